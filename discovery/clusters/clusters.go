// Package clusters follows clusters other than the control plane's own one. The API server of the
// own cluster has Secrets with a kubeconfig for each of these clusters.
//
//  1. clusters.go finds the clusters that the Secrets name, follows each for as long as a Secret names it, and publishes
//     what has changed in any of them.
//  2. remote.go follows the objects of one cluster, with a [kube.Source] for its API server. With new credentials it reads
//     all objects again.
//
// The objects of a cluster are used when all of them were read, and stay in use until the cluster's Secret is removed.
// While the cluster's API server cannot be reached, the objects do not change.
package clusters

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
)

// settleTime is how long the objects of a cluster stay in use after no Secret names the cluster any more: a tool that
// replaces a Secret may delete it first.
const settleTime = 2 * time.Second

// checkEvery is how often Run reads the reason why a cluster cannot be read.
const checkEvery = time.Second

// name is the name of the source.
const name = "the Secrets of other clusters"

// An API is a Kubernetes API server.
type API struct{ *kube.Access }

// Open returns the API server that the file kubeconfig names in its current context. If kubeconfig is "", it returns the
// API server of the pod's service account; outside of a pod the error is [kube.ErrNotInCluster].
func Open(kubeconfig string) (*API, error) {
	access, err := kube.NewAccess(kubeconfig)
	return &API{access}, err
}

// NewObjects returns the objects of the API server.
func (a *API) NewObjects(cfg source.ObjectsConfig) source.Source { return a.Access.NewObjects(cfg) }

// Clusters follows the clusters that Secrets name. Make one with [API.NewClusters].
type Clusters struct {
	cfg     source.ClustersConfig
	secrets *kube.ClusterSecrets
	changed chan struct{} // has an element when something has changed
	outbox  source.Outbox

	remotes map[string]*remote // owned by the goroutine of Run

	mu        sync.Mutex
	links     []link   // the clients of clusters
	selectors []string // the selectors of namespaces
	selected  bool     // selectors is set
}

// A link is a client of a cluster, for goroutines other than that of Run.
type link struct {
	cluster string
	objects *kube.Source
	tokens  *auth.Tokens
}

// NewClusters returns the objects of the clusters that Secrets at the API server name.
func (a *API) NewClusters(cfg source.ClustersConfig) source.Clusters {
	c := &Clusters{cfg: cfg, changed: make(chan struct{}, 1), remotes: map[string]*remote{}, outbox: source.Outbox{Changed: cfg.Changed}}
	c.secrets = kube.NewClusterSecrets(a.Access, cfg.Namespace, c.notify, cfg.Logger)
	return c
}

// notify makes Run look at what has changed.
func (c *Clusters) notify() { chans.Wake(c.changed) }

// Name returns the name of the source.
func (c *Clusters) Name() string { return name }

// Run follows the clusters until ctx ends. All its goroutines have ended when it returns.
func (c *Clusters) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { c.secrets.Run(ctx) })
	defer func() {
		for _, r := range c.remotes {
			r.stop()
		}
	}()
	for {
		began := time.Now()
		next := c.step(ctx)
		pause := time.After(time.Since(began)) // leaves half of the time to other goroutines
		select {
		case <-ctx.Done():
			return
		case <-pause:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(next):
		case <-c.changed:
		}
	}
}

// step publishes what has changed. The result next is the time until the next step if nothing changes earlier.
func (c *Clusters) step(ctx context.Context) (next time.Duration) {
	secrets, ok := c.secrets.All()
	if !ok {
		c.outbox.Put(source.Reading{Waiting: c.secrets.Status().Waiting()})
		return checkEvery
	}
	all, errs := wantedClusters(secrets, c.cfg.Own)
	for name, w := range all {
		if c.remotes[name] == nil {
			c.remotes[name] = &remote{
				name: name, cfg: c.cfg, notify: c.notify, log: c.cfg.Logger.With("cluster", name), stop: func() {}, deadline: time.Now().Add(c.cfg.Wait),
			}
		}
		c.remotes[name].connect(ctx, w)
	}
	u := source.Reading{Errors: errs, Missing: map[string]string{}}
	next = time.Minute
	var waiting []string
	for _, name := range slices.Sorted(maps.Keys(c.remotes)) {
		r := c.remotes[name]
		r.read(&u)
		why := r.waiting()
		switch _, wanted := all[name]; {
		case !wanted:
			next = min(next, c.leave(r, &u))
		case why != "":
			u.Missing[name], next = why, min(next, checkEvery)
			if !r.givenUp(why) {
				waiting = append(waiting, why)
			}
		}
	}
	u.Waiting = strings.Join(waiting, "; ")
	u.Read = u.Waiting == ""
	c.expose()
	c.outbox.Put(u)
	return next
}

// leave removes a cluster that no Secret names any more, after settleTime. The result left is the time until the next
// call.
func (c *Clusters) leave(r *remote, u *source.Reading) (left time.Duration) {
	if r.unwanted.IsZero() {
		r.unwanted = time.Now()
	}
	if left = time.Until(r.unwanted.Add(settleTime)); left > 0 {
		return left
	}
	r.stop()
	delete(c.remotes, r.name)
	if r.used {
		r.log.Warn("no Secret names the cluster any more: its hosts are removed", "was_in", r.wanted.secret.String())
		u.Changes = append(u.Changes, hosts.Change{Cluster: r.name, Dropped: true})
	}
	return time.Minute
}

// Read returns what has changed since the last call. The caller must not change the objects.
func (c *Clusters) Read() source.Reading { return c.outbox.Read() }

// Select sets the discovery selectors of the mesh, in the form of kubectl's --selector. Until then no
// object is read.
func (c *Clusters) Select(selectors []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.selectors, c.selected = selectors, true
	for _, l := range c.links {
		l.objects.Select(selectors)
	}
}

// expose lets other goroutines see the current clients.
func (c *Clusters) expose() {
	var links []link
	for _, name := range slices.Sorted(maps.Keys(c.remotes)) {
		if r := c.remotes[name]; r.objects != nil {
			links = append(links, link{name, r.objects, r.tokens})
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range links {
		if c.selected && !slices.Contains(c.links, l) {
			l.objects.Select(c.selectors)
		}
	}
	c.links = links
}

// Status returns the state of each resource that is read, the Secrets first.
func (c *Clusters) Status() []source.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := []source.Status{c.secrets.Status()}
	for _, l := range c.links {
		all = append(all, l.objects.Status()...)
	}
	return all
}

// Tokens returns the [auth.Tokens] for which the API server of a cluster makes the reviews; nil if there is no such
// cluster.
func (c *Clusters) Tokens(cluster string) *auth.Tokens {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.links {
		if l.cluster == cluster {
			return l.tokens
		}
	}
	return nil
}

// maxName is the length of the longest name of a cluster.
const maxName = 200

// wanted is a cluster that a Secret names.
type wanted struct {
	secret     kube.ClusterSecret
	kubeconfig []byte
}

// wantedClusters returns the clusters that Secrets name, and the errors in the Secrets. The Secrets must be sorted by
// age, the oldest first. If two Secrets name the same cluster, the older Secret counts. ownName is the name of the own
// cluster.
func wantedClusters(secrets []kube.ClusterSecret, ownName string) (map[string]wanted, []object.Error) {
	all := map[string]wanted{}
	var errs []object.Error
	for _, secret := range secrets {
		for _, name := range slices.Sorted(maps.Keys(secret.Kubeconfigs)) {
			first, taken := all[name]
			problem := ""
			switch {
			case name == ownName:
				problem = name + " is this control plane's own cluster (--cluster-id)"
			case len(name) > maxName:
				problem = fmt.Sprintf("want a name of at most %d characters, got %d", maxName, len(name))
			case taken:
				problem = fmt.Sprintf("the cluster %s is already in %s, which is older; this one is ignored", name, first.secret)
			default:
				all[name] = wanted{secret, secret.Kubeconfigs[name]}
				continue
			}
			errs = append(errs, secretError(secret, name, problem))
		}
	}
	return all, errs
}

// secretError returns an error in the kubeconfig of a cluster.
func secretError(secret kube.ClusterSecret, cluster, problem string) object.Error {
	return object.Error{File: secret.String(), Field: "data." + cluster, Msg: problem}
}
