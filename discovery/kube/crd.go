package kube

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/nametap/nametap/discovery/source"
)

// custom names a custom resource and its definition.
type custom struct {
	definition string // name of its definition
	resource   schema.GroupResource
}

// customs returns the custom resources that are read from a cluster. All versions of a custom resource have the same
// fields.
func customs(cluster string) []custom {
	imports := custom{"serviceimports.multicluster.x-k8s.io", schema.GroupResource{Group: "multicluster.x-k8s.io", Resource: "serviceimports"}}
	if cluster != "" {
		return []custom{imports}
	}
	return []custom{
		imports,
		{"serviceentries.networking.istio.io", schema.GroupResource{Group: "networking.istio.io", Resource: "serviceentries"}},
		{"sidecars.networking.istio.io", schema.GroupResource{Group: "networking.istio.io", Resource: "sidecars"}},
	}
}

// A customFeed follows a custom resource while the API server has the resource's definition. A
// Reflector follows the definition; the customFeed is the Reflector's store.
type customFeed struct {
	clients *clients
	custom  custom
	feed    *feed

	health // of the requests for the definition

	// The fields below are owned by the goroutine of run.
	begin func() (stop func()) // begins to follow the resource
	stop  func()               // ends following it; nil while the resource is not followed
}

// newCustomFeed returns a feed for the objects of a custom resource in the selected namespaces.
func newCustomFeed(c custom, clients *clients, n *selection, cfg source.ObjectsConfig) *customFeed {
	return &customFeed{
		clients: clients, custom: c, feed: newFeed(c.resource.Resource, n, cfg),
		health: health{resource: "the definition of " + c.resource.Resource, log: cfg.Logger},
	}
}

// run follows the definition until ctx ends, and the resource while the definition exists.
func (c *customFeed) run(ctx context.Context) {
	c.begin = func() (stop func()) {
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.followResource(ctx)
		}()
		return func() { cancel(); <-done }
	}
	syncStore(ctx, c.clients.definitionLister(c.custom.definition), c, &c.health)
	c.pause()
}

// start follows the resource.
func (c *customFeed) start() {
	if c.stop == nil {
		c.stop = c.begin()
	}
}

// pause stops following the resource.
func (c *customFeed) pause() {
	if c.stop != nil {
		c.stop()
		c.stop = nil
	}
}

// end stops following the resource, and empties the feed.
func (c *customFeed) end() {
	c.pause()
	c.feed.absent()
}

// followResource follows the resource until ctx ends. It first waits until the API server serves the resource, whose
// definition may be new. If the API server does not find the version that is followed, it may serve another version
// now, so followResource asks for the version again.
func (c *customFeed) followResource(ctx context.Context) {
	for pause := retry(); ctx.Err() == nil; {
		var version schema.GroupVersionResource
		err := wait.PollUntilContextCancel(ctx, retry().Duration, true, func(ctx context.Context) (bool, error) {
			var err error
			version, err = c.clients.servedVersion(ctx, c.custom.resource)
			c.feed.noteRequest(ctx, err)
			return err == nil, nil
		})
		if err != nil {
			return // ctx has ended
		}
		following, end := context.WithCancel(ctx)
		c.feed.run(following, c.clients.customLister(version).onNotFound(func(err error) {
			c.feed.noteRequest(ctx, err)
			end()
		}))
		end()
		select {
		case <-ctx.Done():
		case <-time.After(pause.Step()):
		}
	}
}

// status returns the state of the resource. A failure to read the definition counts, too.
func (c *customFeed) status() source.Status {
	s, definition := c.feed.status(), c.health.status(0, true)
	if definition.Failure != "" {
		s.Failure, s.FailingSince = definition.Failure, definition.FailingSince
	}
	if !c.feed.running() {
		s.Heard = definition.Heard // the API server has said that there is no definition
	}
	return s
}

// Add starts to follow the resource.
func (c *customFeed) Add(any) error {
	c.start()
	return nil
}

// Update follows the resource again: the API server may serve another version. The objects stay
// until they are listed again.
func (c *customFeed) Update(any) error {
	c.pause()
	c.start()
	return nil
}

// Delete stops following the resource: its objects are deleted with the definition.
func (c *customFeed) Delete(any) error {
	c.end()
	return nil
}

// Replace follows the resource if there is a definition.
func (c *customFeed) Replace(list []any, _ string) error {
	c.complete()
	if len(list) == 0 {
		c.end()
		return nil
	}
	c.start()
	return nil
}

// Resync does nothing.
func (c *customFeed) Resync() error { return nil }
