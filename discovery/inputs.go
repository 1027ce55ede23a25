package discovery

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/nametap/nametap/discovery/files"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/statedir"
)

// maxPending is how many changes may wait before they are merged. Changes wait while the server is not ready, which
// may last for days, for example if the server lacks a permission.
const maxPending = 100

// inputs are the configured sources. If several sources have the same object, the object of the first source is used.
type inputs struct {
	all      []*input
	kube     source.Source     // nil without the Kubernetes API
	clusters source.Clusters   // nil without other clusters
	missing  map[string]string // why other clusters have no objects in use, by name of the cluster
	changed  chan struct{}     // has an element when a source may have changed
	read     chan struct{}     // closed when all sources were read for the first time, and publish has handled the reading
	readOnce func()            // closes read
	// errs has the errors of the last reading, and errsOf has them by input. While no input has new errors, errs stays the
	// same slice.
	errs   []object.Error
	errsOf [][]object.Error
}

// newInputs makes the configured sources. The sources save objects in state, unless it is nil. They call the function
// result with the result of each step that can fail.
func newInputs(cfg Config, state *statedir.Dir, result func(step string, err error)) (*inputs, error) {
	in := &inputs{changed: make(chan struct{}, 1), read: make(chan struct{})}
	in.readOnce = sync.OnceFunc(func() { close(in.read) })
	changed := func() { chans.Wake(in.changed) }
	if cfg.ConfigDir != "" {
		dir, err := files.New(files.Config{
			Dir: cfg.ConfigDir, AllowEmpty: cfg.AllowEmpty, State: state, Debounce: cfg.Debounce,
			Changed: changed, Result: result, Logger: cfg.Logger,
		})
		if err != nil {
			return nil, err
		}
		in.all = append(in.all, &input{Source: dir})
	}
	if cfg.Kubernetes == nil {
		return in, nil
	}
	from := source.ObjectsConfig{RootNamespace: cfg.RootNamespace, Changed: changed, Logger: cfg.Logger}
	var err error
	if cfg.ClustersNamespace != "" {
		if in.clusters, err = newClusters(cfg, state, result, changed); err != nil {
			return nil, err
		}
		from.NetworkOf, from.Selected = cfg.RootNamespace, in.clusters.Select
	}
	if in.kube, err = cfg.Kubernetes.NewObjects(from); err != nil {
		return nil, err
	}
	in.all = append(in.all, &input{Source: in.kube})
	if in.clusters != nil {
		in.all = append(in.all, &input{Source: in.clusters})
	}
	return in, nil
}

// defaultClusterID is the name that agents give their cluster by default.
const defaultClusterID = "Kubernetes"

// newClusters makes the other clusters.
func newClusters(cfg Config, state *statedir.Dir, result func(step string, err error), changed func()) (source.Clusters, error) {
	if state == nil {
		cfg.Logger.Warn("without a state directory, the hosts of a cluster are missing after a restart while its API server is away (--state-dir)")
	}
	return cfg.Kubernetes.NewClusters(source.ClustersConfig{
		Namespace: cfg.ClustersNamespace, RootNamespace: cfg.RootNamespace, Own: cmp.Or(cfg.ClusterID, defaultClusterID), TokenAudience: cfg.TokenAudience,
		Wait: cfg.ClusterTimeout, State: state, Result: result, Changed: changed, Logger: cfg.Logger,
	})
}

// run runs all sources until ctx ends.
func (in *inputs) run(ctx context.Context) {
	var running sync.WaitGroup
	for _, one := range in.all {
		running.Go(func() { one.Run(ctx) })
	}
	running.Wait()
}

// collect reads the sources, and returns one reading of them all. The reading has the changes that were not served yet.
func (in *inputs) collect() source.Reading {
	all := source.Reading{Read: true}
	var errs [][]object.Error
	for i, one := range in.all {
		one.take(i)
		r := one.last
		all.Changes = append(all.Changes, r.Changes...)
		errs = append(errs, r.Errors)
		all.Notes = append(all.Notes, r.Notes...)
		all.Kept += r.Kept
		if !r.Read && r.Waiting == "" {
			r.Waiting = one.Name() + " has not been read yet"
		}
		all.Read = all.Read && r.Read
		all.Waiting = cmp.Or(all.Waiting, r.Waiting)
		if r.Missing != nil {
			all.Missing = r.Missing
		}
	}
	if !slices.EqualFunc(errs, in.errsOf, same) {
		in.errsOf, in.errs = errs, slices.Concat(errs...)
	}
	all.Errors = in.errs
	return all
}

// same reports whether two lists are in the same memory. If they are, they need not be compared.
func same[T any](a, b []T) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// readAll runs the sources until all were read once, or ctx ends.
func (in *inputs) readAll(ctx context.Context) (source.Reading, error) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { in.run(ctx) })
	for {
		if r := in.collect(); r.Read {
			return r, nil
		} else if ctx.Err() != nil {
			return r, fmt.Errorf("reading %s: %s", strings.Join(in.names(), " and "), r.Waiting)
		}
		select {
		case <-in.changed:
		case <-ctx.Done():
		}
	}
}

// served notes that all changes are served.
func (in *inputs) served() {
	for _, one := range in.all {
		one.last.Changes = nil
	}
}

// number returns the number of a source. If sources have the same object, the object of the source with the lowest
// number is used.
func (in *inputs) number(src source.Source) int {
	return slices.IndexFunc(in.all, func(one *input) bool { return one.Source == src })
}

// names returns the names of the sources.
func (in *inputs) names() []string {
	var names []string
	for _, one := range in.all {
		names = append(names, one.Name())
	}
	return names
}

// An input is a source and its last reading. The Changes of the reading are all changes that were not served yet.
type input struct {
	source.Source
	last source.Reading
}

// take reads the source. The parameter number is the source's number.
func (one *input) take(number int) {
	pending := one.last.Changes
	one.last = one.Read()
	for _, c := range one.last.Changes {
		if c.Cluster == "" {
			c.Source = number
		}
		pending = append(pending, c)
	}
	if len(pending) > maxPending {
		pending = hosts.Merge(pending)
	}
	one.last.Changes = pending
}
