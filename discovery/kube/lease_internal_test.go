package kube

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A candidate is an election that runs.
type candidate struct {
	*election
	proxy *cut
	stop  func()
}

// cut is a transport to the API server that can be cut.
type cut struct {
	http.RoundTripper
	off  atomic.Bool
	sent atomic.Int32 // requests
}

// RoundTrip sends a request, or waits until its time has ended.
func (c *cut) RoundTrip(request *http.Request) (*http.Response, error) {
	if c.off.Load() {
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	c.sent.Add(1)
	return c.RoundTripper.RoundTrip(request)
}

// elect runs an election with short times. leading counts the candidates that lead; more than one at a time
// fails the test.
func elect(t *testing.T, api *fakekube.API, identity string, leading *atomic.Int32) candidate {
	t.Helper()
	access, err := NewAccess(api.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	c := candidate{proxy: new(cut)}
	access.config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		c.proxy.RoundTripper = next
		return c.proxy
	})
	client, err := typedClient(access.config, coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		t.Fatal(err)
	}
	c.election = &election{
		name: source.Name{Namespace: "nametap-system", Name: "test"}, identity: identity, leases: client, log: testlog.New(t).Logger(),
		times: leaseTimes{duration: 2 * time.Second, deadline: 500 * time.Millisecond, retry: 50 * time.Millisecond, request: 200 * time.Millisecond},
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.run(ctx, func(ctx context.Context) {
			if leading.Add(1) > 1 {
				t.Errorf("%s leads beside another one", identity)
			}
			<-ctx.Done()
			leading.Add(-1)
		})
	}()
	c.stop = func() { cancel(); <-done }
	t.Cleanup(c.stop)
	return c
}

// TestElection checks that one of several candidates leads at a time: when the leader is cut off from the API
// server, when its Lease is deleted or taken by force, and when it ends.
func TestElection(t *testing.T) { // D39, D40
	t.Parallel()
	api := fakekube.Start(t)
	var leading atomic.Int32
	first := elect(t, api, "first", &leading)
	wait.Until(t, "the first candidate leads", first.holds.Load)
	second := elect(t, api, "second", &leading)
	wait.Until(t, "the second candidate has seen the Lease", func() bool { return second.proxy.sent.Load() > 1 })

	api.Remove(fakekube.Leases, "nametap-system/test")
	wait.Until(t, "the leader has written the Lease again", func() bool {
		lease := api.Object(fakekube.Leases, "nametap-system/test")
		return lease != nil && lease.Object["spec"].(map[string]any)["holderIdentity"] == "first"
	})

	first.proxy.off.Store(true)
	wait.Until(t, "the candidate that is cut off stops", func() bool { return !first.holds.Load() })
	wait.Until(t, "the second candidate leads", second.holds.Load)
	first.proxy.off.Store(false)

	api.Put(fakekube.Leases, "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {name: test, namespace: nametap-system}\nspec: {holderIdentity: force, leaseDurationSeconds: 1}\n")
	wait.Until(t, "the second candidate stops", func() bool { return !second.holds.Load() })
	wait.Until(t, "one leads when that Lease has ended", func() bool { return first.holds.Load() || second.holds.Load() })

	leader, other := first, second
	if second.holds.Load() {
		leader, other = second, first
	}
	leader.stop()
	if spec := api.Object(fakekube.Leases, "nametap-system/test").Object["spec"].(map[string]any); spec["holderIdentity"] == leader.identity {
		t.Errorf("at the end the Lease still has %v", spec)
	}
	wait.Until(t, "the other candidate leads", other.holds.Load)
}
