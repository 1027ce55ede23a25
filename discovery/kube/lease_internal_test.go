package kube

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
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
	off atomic.Bool
}

// RoundTrip sends a request, or waits until its time has ended.
func (c *cut) RoundTrip(request *http.Request) (*http.Response, error) {
	if c.off.Load() {
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	return c.RoundTripper.RoundTrip(request)
}

// inProcess is a transport to an API server that needs no network.
type inProcess struct{ *fakekube.API }

// RoundTrip lets the API server answer a request.
func (p inProcess) RoundTrip(request *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	p.ServeHTTP(recorder, request)
	return recorder.Result(), nil
}

// elect runs an election in virtual time. leading counts the candidates that lead; more than one at a time
// fails the test.
func elect(t *testing.T, api *fakekube.API, identity string, leading *atomic.Int32) candidate {
	t.Helper()
	access, err := NewAccess(api.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	c := candidate{proxy: &cut{RoundTripper: inProcess{api}}}
	access.config.Wrap(func(http.RoundTripper) http.RoundTripper { return c.proxy })
	client, err := typedClient(access.config, coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		t.Fatal(err)
	}
	c.election = &election{
		name: source.Name{Namespace: "nametap-system", Name: "test"}, identity: identity, leases: client, log: testlog.New(t).Logger(),
		times: writerLease,
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
	return c
}

// TestElection checks that one of several candidates leads at a time, and another one soon after: when the leader is cut
// off from the API server, when its Lease is deleted or taken by force, and when it ends.
func TestElection(t *testing.T) { // D39, D40
	api := fakekube.Start(t)
	synctest.Test(t, func(t *testing.T) {
		var leading atomic.Int32
		first := elect(t, api, "first", &leading)
		pass(time.Second)
		second := elect(t, api, "second", &leading)
		pass(time.Minute)
		if !first.holds.Load() || second.holds.Load() {
			t.Error("the first candidate does not lead")
		}
		api.Remove(fakekube.Leases, "nametap-system/test")
		pass(time.Minute)
		lease := api.Object(fakekube.Leases, "nametap-system/test")
		if lease == nil || lease.Object["spec"].(map[string]any)["holderIdentity"] != "first" {
			t.Errorf("the leader has not written the Lease again: %v", lease)
		}

		first.proxy.off.Store(true)
		pass(writerLease.deadline)
		if first.holds.Load() {
			t.Error("the candidate that is cut off leads")
		}
		pass(20*time.Second - writerLease.deadline)
		if !second.holds.Load() {
			t.Error("no other candidate leads after 20 s")
		}
		first.proxy.off.Store(false)

		api.Put(fakekube.Leases, "apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {name: test, namespace: nametap-system}\nspec: {holderIdentity: force, leaseDurationSeconds: 20}\n")
		pass(10 * time.Second)
		if n := leading.Load(); n != 0 {
			t.Errorf("%d candidates lead while another process has the Lease", n)
		}
		pass(15 * time.Second)
		leader, other := first, second
		if second.holds.Load() {
			leader, other = second, first
		}
		if !leader.holds.Load() {
			t.Error("none leads after that Lease has ended")
		}
		leader.stop()
		if spec := api.Object(fakekube.Leases, "nametap-system/test").Object["spec"].(map[string]any); spec["holderIdentity"] == leader.identity {
			t.Errorf("at the end the Lease still has %v", spec)
		}
		pass(5 * time.Second)
		if !other.holds.Load() {
			t.Error("the other candidate does not lead")
		}
		other.stop()
	})
}
