package nds_test

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/nds"
)

// workload is a node that a test can change.
type workload struct {
	mu      sync.Mutex
	ips     []netip.Addr
	labels  map[string]string
	err     error
	changed chan struct{}
}

func newWorkload(ips ...string) *workload {
	w := &workload{changed: make(chan struct{}, 1)}
	w.set(nil, nil, ips...)
	return w
}

// set changes the node and signals it.
func (w *workload) set(err error, labels map[string]string, ips ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err, w.labels, w.ips = err, labels, nil
	for _, ip := range ips {
		w.ips = append(w.ips, netip.MustParseAddr(ip))
	}
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// config makes a client use the node.
func (w *workload) config(cfg *nds.Config) {
	cfg.Changed = w.changed
	cfg.Refresh = func(node nds.Node) (nds.Node, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		node.IPs, node.Labels = w.ips, w.labels
		return node, w.err
	}
}

// wantStream waits for the stream with this number and checks the addresses and the label
// "app" of its node.
func (h *harness) wantStream(stream int, ips, app string) {
	h.t.Helper()
	r, err := h.server.WaitStream(h.ctx, stream)
	if err != nil {
		h.t.Fatal(err)
	}
	fields := r.Node().GetMetadata().GetFields()
	if got := fields["INSTANCE_IPS"].GetStringValue(); got != ips {
		h.t.Fatalf("addresses of stream %d: %q, want %q", stream, got, ips)
	}
	if got := fields["LABELS"].GetStructValue().GetFields()["app"].GetStringValue(); got != app {
		h.t.Fatalf("label of stream %d: %q, want %q", stream, got, app)
	}
}

// C1: the client sends the addresses and labels that it has when it connects. When they
// change it connects again; the table stays in use meanwhile.
func TestNodeChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorkload("127.0.0.1")
		h := start(t, options{config: w.config})
		h.server.Push(hosts("a.example.com"))
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.wantStream(1, "127.0.0.1", "")
		w.set(nil, nil, "10.0.0.1", "fd00::1")
		h.wantStream(2, "10.0.0.1,fd00::1", "")
		w.set(nil, map[string]string{"app": "web"}, "10.0.0.1", "fd00::1")
		h.wantStream(3, "10.0.0.1,fd00::1", "web")
		h.wantLog("level=INFO", "connecting again", "addresses or labels")
		// An error of Refresh does not end the stream.
		w.set(errors.New("not now"), nil)
		h.server.CutStreams(nil)
		h.wantLog("level=WARN", "reading the addresses and labels of this node: not now")
		h.wantStatus(func(s nds.Status) bool { return s.Loaded && !s.Connected })
		w.set(nil, nil, "10.0.0.9")
		h.wantStream(4, "10.0.0.9", "")
		h.wantNothingApplied()
	})
}
