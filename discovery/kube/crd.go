package kube

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/nametap/nametap/discovery/source"
)

// pollEvery is the pause between two questions whether the API server serves a custom resource. After a failed question
// it is shorter at first (retry).
const pollEvery = 3 * time.Second

// A custom is a custom resource and its feed. All versions of the resource have the same fields.
type custom struct {
	*feed
	clients  *clients
	resource schema.GroupResource
}

// newCustoms returns the custom resources that are read from a cluster.
func newCustoms(c *clients, n *selection, cfg source.ObjectsConfig) (all []custom) {
	resources := []schema.GroupResource{{Group: "multicluster.x-k8s.io", Resource: "serviceimports"}}
	if cfg.Cluster == "" {
		resources = append(resources,
			schema.GroupResource{Group: "networking.istio.io", Resource: "serviceentries"},
			schema.GroupResource{Group: "networking.istio.io", Resource: "sidecars"})
	}
	for _, r := range resources {
		all = append(all, custom{newFeed(r.Resource, n, cfg), c, r})
	}
	return all
}

// run follows the resource in a version that the API server serves, until ctx ends. When the API server does not find
// that version any more, run asks again which version it serves.
func (c custom) run(ctx context.Context) {
	var missing error // why the API server has not found the version that was followed last
	for failed := retry(); ctx.Err() == nil; {
		pause := pollEvery
		version, served, err := c.clients.servedVersion(ctx, c.resource)
		switch {
		case err != nil:
			pause = failed.Step()
			c.noteRequest(ctx, err)
		case !served:
			failed, missing = retry(), nil
			c.absent(ctx)
		default:
			failed = retry()
			c.noteRequest(ctx, missing)
			following, end := context.WithCancel(ctx)
			c.feed.run(following, c.clients.customLister(version).onNotFound(func(err error) {
				missing = err
				end()
			}))
			end()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}
