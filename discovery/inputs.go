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
)

// inputs are the configured sources. If several sources have the same object, the object of the first source is used.
type inputs struct {
	all      []source.Source
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

// newInputs makes the configured sources. The function directoryRead is called with the result of each look at the
// directory.
func newInputs(cfg Config, directoryRead func(error)) (*inputs, error) {
	in := &inputs{changed: make(chan struct{}, 1), read: make(chan struct{})}
	in.readOnce = sync.OnceFunc(func() { close(in.read) })
	changed := func() { chans.Wake(in.changed) }
	if cfg.ConfigDir != "" {
		dir, err := files.New(files.Config{
			Dir: cfg.ConfigDir, AllowEmpty: cfg.AllowEmpty, Debounce: cfg.Debounce,
			Changed: changed, Result: directoryRead,
		})
		if err != nil {
			return nil, err
		}
		in.all = append(in.all, dir)
	}
	if cfg.Kubernetes == nil {
		return in, nil
	}
	from := source.ObjectsConfig{RootNamespace: cfg.RootNamespace, Changed: changed, Logger: cfg.Logger}
	if cfg.ClustersNamespace != "" {
		in.clusters = cfg.Kubernetes.NewClusters(source.ClustersConfig{
			Namespace: cfg.ClustersNamespace, RootNamespace: cfg.RootNamespace, Own: cmp.Or(cfg.ClusterID, defaultClusterID), TokenAudience: cfg.TokenAudience,
			Wait: cfg.ClusterTimeout, Changed: changed, Logger: cfg.Logger,
		})
		from.NetworkOf, from.Selected = cfg.RootNamespace, in.clusters.Select
	}
	in.all = append(in.all, cfg.Kubernetes.NewObjects(from))
	if in.clusters != nil {
		in.all = append(in.all, in.clusters)
	}
	return in, nil
}

// defaultClusterID is the name that agents give their cluster by default.
const defaultClusterID = "Kubernetes"

// run runs all sources until ctx ends.
func (in *inputs) run(ctx context.Context) {
	var running sync.WaitGroup
	for _, one := range in.all {
		running.Go(func() { one.Run(ctx) })
	}
	running.Wait()
}

// collect reads the sources, and returns one reading of them all.
func (in *inputs) collect() source.Reading {
	all := source.Reading{Read: true}
	var errs [][]object.Error
	for i, one := range in.all {
		r := one.Read()
		for _, c := range r.Changes {
			if c.Cluster == "" {
				c.Source = i
			}
			all.Changes = append(all.Changes, c)
		}
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

// readAll runs the sources until all were read once, or ctx ends. It calls update with the changes of each reading.
func (in *inputs) readAll(ctx context.Context, update func(...hosts.Change) hosts.Update) ([]object.Error, error) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { in.run(ctx) })
	for {
		r := in.collect()
		u := update(r.Changes...)
		switch {
		case r.Read:
			return slices.Concat(r.Errors, u.Problems), nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("reading %s: %s", strings.Join(in.names(), " and "), r.Waiting)
		}
		select {
		case <-in.changed:
		case <-ctx.Done():
		}
	}
}

// names returns the names of the sources.
func (in *inputs) names() []string {
	var names []string
	for _, one := range in.all {
		names = append(names, one.Name())
	}
	return names
}
