package kube

import (
	"context"
	"time"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// pollEvery is the pause between two questions whether the API server serves a custom resource. After a failed question
// it is shorter at first (retry).
const pollEvery = 3 * time.Second

// A custom is a custom resource and its store. All versions of the resource have the same fields.
type custom struct {
	*objects
	group string // of the API
}

// newCustoms returns the custom resources that are read from a cluster.
func newCustoms(n *selection, cfg source.ObjectsConfig) (all []custom) {
	add := func(group, name, kind string) {
		all = append(all, custom{newObjects(resource{name: name, kind: kind}, n, cfg), group})
	}
	add("multicluster.x-k8s.io", "serviceimports", object.KindServiceImport)
	if cfg.Cluster == "" {
		add("networking.istio.io", "serviceentries", object.KindServiceEntry)
		add("networking.istio.io", "sidecars", object.KindSidecar)
	}
	return all
}

// run follows the resource in a version that the API server serves, until ctx ends. When the API server does not find
// that version any more, run asks again which version it serves.
func (c custom) run(ctx context.Context) {
	var missing error // why the API server has not found the version that was followed last
	for failed := retry(); ctx.Err() == nil; {
		pause := pollEvery
		version, served, err := servedVersion(ctx, c.resource.client, c.group, c.resource.name)
		switch {
		case err != nil:
			pause = failed.Step()
			c.noteRequest(ctx, err)
		case !served:
			failed, missing = retry(), nil
			_ = c.Replace(nil, "") // it returns nil
		default:
			failed = retry()
			c.noteRequest(ctx, missing)
			following, end := context.WithCancel(ctx)
			c.resource.path = "/apis/" + c.group + "/" + version + "/" + c.resource.name
			c.resource.missing = func(err error) {
				missing = err
				end()
			}
			c.objects.run(following)
			end()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}
