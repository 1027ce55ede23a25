package discovery

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// A scripted API server has one Service, and says what the test wants. It needs no network, so servers run in virtual
// time with it.
type scripted struct {
	source.API
	source.Source
	outbox source.Outbox
}

func (s *scripted) NewObjects(cfg source.ObjectsConfig) source.Source {
	s.outbox.Changed = cfg.Changed
	return s
}

func (s *scripted) Name() string         { return "the script" }
func (s *scripted) Read() source.Reading { return s.outbox.Read() }

// service returns the Service with one of many addresses.
func (s *scripted) service(i int) object.Object {
	ip := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
	return object.Object{
		Key:     object.Key{Kind: object.KindService, Namespace: "shop", Name: "web"},
		Service: &object.Service{ClusterIPs: []netip.Addr{ip}},
	}
}

// put changes the Service.
func (s *scripted) put(i int, r source.Reading) {
	r.Changes = []hosts.Change{{Updated: []object.Object{s.service(i)}}}
	s.outbox.Put(r)
}

// onScript returns a server of an API server, which does not listen.
func onScript(t *testing.T, script *scripted) (*Server, *testlog.Buffer) {
	t.Helper()
	log := testlog.New(t)
	s, err := New(Config{Kubernetes: script, Logger: log.Logger()})
	if err != nil {
		t.Fatal(err)
	}
	s.addr = new(net.TCPAddr) // which the log names
	return s, log
}

// changes reports whether an object is a change for the server.
func (s *Server) changes(o object.Object) bool {
	u := s.push.Update([]hosts.Change{{Updated: []object.Object{o}}}, func(hosts.Update, hosts.Counts) {})
	return len(u.Hosts) > 0
}

// TestManyEdits checks that 3,000 edits within 3 s cause a build for each 30 ms, and that the last one is served.
func TestManyEdits(t *testing.T) { // D3, D19
	synctest.Test(t, func(t *testing.T) {
		script := new(scripted)
		s, _ := onScript(t, script)
		ctx, cancel := context.WithCancel(t.Context())
		go s.serveChanges(ctx)
		for i := range 3000 {
			script.put(i, source.Reading{Read: true})
			time.Sleep(time.Millisecond) //nolint:forbidigo // of the bubble's clock
		}
		time.Sleep(defaultDebounce) //nolint:forbidigo // of the bubble's clock
		synctest.Wait()
		if n := testutil.ToFloat64(s.metrics.builds); n < 95 || n > 101 {
			t.Errorf("%v builds in 3 s, want one each 30 ms", n)
		}
		cancel()
		synctest.Wait()
		if s.changes(script.service(2999)) {
			t.Error("the last edit is not served")
		}
	})
}

// TestChangesWhileNotReady checks that a reason why a server is not ready that changes all the time does not fill the log.
func TestChangesWhileNotReady(t *testing.T) { // D43
	synctest.Test(t, func(t *testing.T) {
		script := new(scripted)
		s, log := onScript(t, script)
		const last = 1000
		for i := range last {
			script.put(i, source.Reading{Waiting: fmt.Sprint("a resource is forbidden, on port ", i)})
			s.publish(s.inputs.collect())
			time.Sleep(6 * time.Second / last) //nolint:forbidigo // of the bubble's clock
		}
		if n := log.Count("not ready, no stream is served"); n != 2 {
			t.Errorf("%d lines in 6 s say why, want one every 5 s:\n%s", n, log)
		}
		if chans.Closed(s.Ready()) {
			t.Error("the server is ready")
		}
		script.put(last, source.Reading{Read: true})
		s.publish(s.inputs.collect())
		if !chans.Closed(s.Ready()) || s.Waiting() != "" || s.changes(script.service(last)) || !s.changes(script.service(0)) {
			t.Error("the last change is not served")
		}
	})
}

// TestErrorsAreLoggedOnce checks that an error in an object is logged once while it lasts, and again if it comes back.
func TestErrorsAreLoggedOnce(t *testing.T) { // D18
	log := testlog.New(t)
	m, err := newMetrics(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	r := newReport(log.Logger(), m)
	broken := func(messages ...string) source.Reading {
		var all source.Reading
		for _, message := range messages {
			all.Errors = append(all.Errors, object.Error{File: "a.yaml", Document: 1, Msg: message})
		}
		all.Notes = []string{"a ConfigMap"}
		return all
	}
	for _, all := range []source.Reading{broken("one"), broken("one", "two"), broken("two"), broken(), broken("one")} {
		r.log(all, hosts.Update{
			Problems: []object.Error{{File: "alias.example.com"}},
			Hidden:   []hosts.Hidden{{Namespace: "shop", Size: 5 << 20, Own: true}},
		})
	}
	for text, want := range map[string]int{
		"a.yaml, document 1: one": 2, "a.yaml, document 1: two": 1, "a ConfigMap": 1, "alias.example.com": 1,
		"have 5120 KiB in tables": 1, "has more than 4096 KiB, and is in no table": 1,
	} {
		if n := log.Count(text); n != want {
			t.Errorf("%d lines with %q, want %d:\n%s", n, text, want, log)
		}
	}
}
