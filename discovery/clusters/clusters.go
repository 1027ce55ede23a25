package clusters

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/kube"
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
	if err != nil {
		return nil, err
	}
	return &API{access}, nil
}

// NewObjects returns the objects of the API server.
func (a *API) NewObjects(cfg source.ObjectsConfig) (source.Source, error) {
	return a.Access.NewObjects(cfg)
}

// Clusters follows the clusters that Secrets name. Make one with [API.NewClusters].
type Clusters struct {
	cfg     source.ClustersConfig
	secrets *kube.ClusterSecrets
	changed chan struct{} // has an element when something has changed
	outbox  source.Outbox

	// The fields below are owned by the goroutine of Run.
	remotes map[string]*remote
	saved   snapshots
	listed  bool // the Secrets were read once

	mu        sync.Mutex
	links     []namedLink     // the current clients of clusters
	kept      []source.Status // the state of saved objects in use
	selectors []string        // the selectors of namespaces
	selected  bool            // selectors is set
}

// A namedLink is a client of a cluster and the name of the cluster, for goroutines other than that of Run.
type namedLink struct {
	cluster string
	*link
}

// NewClusters returns the objects of the clusters that Secrets at the API server name.
func (a *API) NewClusters(cfg source.ClustersConfig) (source.Clusters, error) {
	c := &Clusters{
		cfg: cfg, changed: make(chan struct{}, 1), remotes: map[string]*remote{}, saved: snapshots{cfg.State},
		outbox: source.Outbox{Changed: cfg.Changed},
	}
	var err error
	c.secrets, err = kube.NewClusterSecrets(a.Access, cfg.Namespace, c.notify, cfg.Logger)
	return c, err
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
			c.save(r)
			r.close()
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		began := time.Now()
		next := c.step(ctx)
		took := time.Since(began)
		timer.Reset(took) // leaves half of the time to other goroutines
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-c.changed:
		}
	}
}

// step publishes what has changed. The result next is the time until the next step if nothing changes earlier.
func (c *Clusters) step(ctx context.Context) (next time.Duration) {
	secrets, ok := c.secrets.All()
	if !ok {
		c.outbox.Put(source.Reading{Waiting: c.secrets.Waiting()})
		return checkEvery
	}
	all, errs := wantedClusters(secrets, c.cfg.Own)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		c.remote(name).connect(ctx, all[name])
	}
	if !c.listed {
		c.listed = true
		for _, name := range c.saved.clusters() {
			c.remote(name) // if no Secret names it, leave removes it again
		}
	}
	u := source.Reading{Errors: errs, Missing: map[string]string{}}
	next = time.Minute
	var waiting []string
	for _, name := range slices.Sorted(maps.Keys(c.remotes)) {
		r := c.remotes[name]
		if _, ok := all[name]; !ok {
			next = min(next, c.leave(r, &u))
			continue
		}
		c.read(r, &u)
		why := r.waiting()
		if why == "" {
			continue
		}
		u.Missing[name], next = why, min(next, checkEvery)
		if !r.givenUp(why) {
			waiting = append(waiting, why)
		}
	}
	u.Waiting = strings.Join(waiting, "; ")
	u.Read = u.Waiting == ""
	c.expose()
	c.outbox.Put(u)
	return min(next, c.saveAll())
}

// read adds to u the changes of a cluster, its errors, and the number of its saved objects in use.
func (c *Clusters) read(r *remote, u *source.Reading) {
	u.Changes = r.read(u.Changes)
	if r.live == nil && !r.tried && time.Since(r.firstNamed) >= c.cfg.Wait/4 {
		c.restore(r, u)
	}
	u.Errors = r.addErrors(u.Errors)
	if r.restored != nil {
		u.Kept += len(r.restored.Objects)
	}
}

// restore applies the saved objects of a cluster, if there are any.
func (c *Clusters) restore(r *remote, u *source.Reading) {
	r.tried = true
	from, err := c.saved.load(r.name)
	if err != nil {
		r.log.Error("the saved objects of a cluster cannot be used", "error", err)
	}
	if from == nil {
		return
	}
	r.log.Warn("a cluster cannot be read; its saved objects are used until it can", "objects", len(from.Objects), "saved", from.Written, "error", r.waiting())
	r.restored = from
	u.Changes = append(u.Changes, hosts.Change{Cluster: r.name, Updated: from.Objects, Whole: true})
}

// saveAll saves the objects of the clusters that have changed, each cluster at most once in saveEvery. The result next
// is the time until the next call.
func (c *Clusters) saveAll() (next time.Duration) {
	next = time.Minute
	for _, r := range c.remotes {
		if !r.unsaved {
			continue
		}
		if left := time.Until(r.saved.Add(saveEvery)); left > 0 {
			next = min(next, left)
			continue
		}
		c.save(r)
		next = min(next, saveEvery)
	}
	return next
}

// save saves the objects of a cluster if they have changed.
func (c *Clusters) save(r *remote) {
	if c.cfg.State == nil || !r.unsaved {
		return
	}
	r.saved = time.Now()
	err := c.saved.save(r.name, r.live.objects.All())
	r.unsaved = err != nil
	c.cfg.Result(source.StepSaveCluster, err)
}

// remote returns the cluster with a name, and makes it if it is new.
func (c *Clusters) remote(name string) *remote {
	r := c.remotes[name]
	if r == nil {
		r = newRemote(name, c.cfg, c.notify)
		c.remotes[name] = r
	}
	return r
}

// leave removes a cluster that no Secret names any more, after settleTime. The result left is the time until the next
// call.
func (c *Clusters) leave(r *remote, u *source.Reading) (left time.Duration) {
	if r.unwanted.IsZero() {
		r.unwanted = time.Now()
	}
	if left = time.Until(r.unwanted.Add(settleTime)); left > 0 {
		u.Changes = r.read(u.Changes)
		return left
	}
	used := r.used()
	if used {
		r.log.Warn("no Secret names the cluster any more: its hosts are removed", "was_in", r.wanted.secret.String())
	}
	r.close()
	delete(c.remotes, r.name)
	if err := c.saved.remove(r.name); err != nil {
		r.log.Error("the saved objects of a cluster stay", "error", err)
	}
	if used {
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
	var links []namedLink
	var kept []source.Status
	for _, name := range slices.Sorted(maps.Keys(c.remotes)) {
		r := c.remotes[name]
		if from := r.restored; from != nil {
			kept = append(kept, source.Status{Cluster: name, Resource: "saved objects", Objects: len(from.Objects), Synced: true, Heard: from.Written})
		}
		for _, l := range []*link{r.live, r.next} {
			if l != nil {
				links = append(links, namedLink{name, l})
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range links {
		if c.selected && !slices.Contains(c.links, l) {
			l.objects.Select(c.selectors)
		}
	}
	c.links, c.kept = links, kept
}

// Status returns the state of each resource that is read, the Secrets first.
func (c *Clusters) Status() []source.Status {
	c.mu.Lock()
	links, kept := c.links, c.kept
	c.mu.Unlock()
	all := append([]source.Status{c.secrets.Status()}, kept...)
	for _, l := range links {
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
