// Package resolved_test tests package resolved with a D-Bus daemon and a fake of systemd-resolved, in network namespaces.
package resolved_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

// A host is a network namespace with a Registrar.
type host struct {
	*resolved.Registrar
	net     *netns.NS
	log     *testlog.Buffer
	off     atomic.Bool
	domains atomic.Pointer[[]string]
	// returned has the domains of the last call of Returned.
	returned atomic.Pointer[[]string]
	end      func() // ends Run, and removes the registration
}

// start starts a Registrar that checks every interval. The directory of systemd-resolved is
// dir.
func start(t *testing.T, interval time.Duration, dir string) *host {
	t.Helper()
	return startIn(t, netns.New(t), interval, dir)
}

func startIn(t *testing.T, ns *netns.NS, interval time.Duration, dir string) *host {
	t.Helper()
	h := &host{net: ns, log: testlog.New(t)}
	h.domains.Store(&[]string{"cluster.local", "local"})
	h.Registrar = resolved.New(resolved.Config{
		Enabled:  func() bool { return !h.off.Load() },
		Server:   func() netip.AddrPort { return netip.MustParseAddrPort("127.0.0.1:15053") },
		Domains:  func() []string { return *h.domains.Load() },
		Returned: func(domains []string) { h.returned.Store(&domains) }, Interval: interval, Logger: h.log.Logger(),
		Dir: dir, Helper: filepath.Join(dir, "helper"),
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.net.Run(func() {
			h.Run(ctx)
			if err := h.Remove(); err != nil {
				t.Errorf("removing the registration: %v", err)
			}
		})
	}()
	h.end = func() {
		cancel()
		<-ended
	}
	t.Cleanup(h.end)
	return h
}

// link returns the index of the interface, 0 without one.
func (h *host) link() (index int) {
	h.net.Run(func() {
		if link, err := net.InterfaceByName(resolved.LinkName); err == nil {
			index = link.Index
		}
	})
	return index
}

func (h *host) await(t *testing.T, state resolved.State) {
	t.Helper()
	wait.Until(t, "the registration is "+string(state), func() bool { return h.Status().State == state })
}

// V5: the agent registers a nameserver for its domains, and leaves nothing behind.
func TestRegister(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, resolved.Registered)
	if got := f.taken(); got != "DNSSEC DNSOverTLS LLMNR MulticastDNS DefaultRoute Domains DNSEx" {
		t.Errorf("the calls are %q", got)
	}
	index := h.link()
	if got := f.domains(index); !slices.Equal(got, []string{"cluster.local", "local"}) {
		t.Errorf("the domains are %q", got)
	}
	h.net.Run(func() {
		link, err := net.InterfaceByIndex(index)
		if err != nil || link.Flags&net.FlagUp == 0 || link.Flags&net.FlagMulticast != 0 {
			t.Errorf("the interface is %+v, %v; want it up, without multicast", link, err)
			return
		}
		if addrs, err := link.Addrs(); len(addrs) != 1 || addrs[0].String() != "127.15.53.1/32" {
			t.Errorf("the interface has %v, %v", addrs, err)
		}
	})
	if got := *h.returned.Load(); !slices.Equal(got, f.domains(index)) {
		t.Errorf("the agent knows the domains %q", got)
	}
	h.end()
	if index := h.link(); index != 0 || len(*h.returned.Load()) != 0 {
		t.Errorf("interface %d stays, and the agent knows the domains %q", index, *h.returned.Load())
	}
}

// V5: other domains change the registration.
func TestDomainsChange(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Registered)
	h.domains.Store(&[]string{"corp.example", "local"})
	wait.Until(t, "the domains have changed", func() bool {
		return slices.Equal(f.domains(h.link()), []string{"corp.example", "local"}) && slices.Equal(*h.returned.Load(), f.domains(h.link()))
	})
}

// V5: a registration that another program changes, or whose interface is deleted, is repaired.
func TestRepair(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Registered)
	if err := f.set("DNSEx", int32(h.link()), []server{}); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the nameserver is repaired", func() bool { return h.log.Count("was made again") == 1 })
	previous := h.link()
	h.net.Exec("ip", "link", "delete", resolved.LinkName)
	wait.Until(t, "the interface is repaired", func() bool { // after an error, if it is deleted amidst a look
		index := h.link()
		return index != 0 && index != previous && len(f.domains(index)) > 0
	})
}

// V5: after systemd-resolved starts, or restarts without its settings, the agent registers at its next check. It
// notices the end of D-Bus.
func TestResolvedRestarts(t *testing.T) {
	endBus := startBus(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Absent)
	f := startFake(t)
	h.await(t, resolved.Registered)
	f.stop()
	h.await(t, resolved.Absent)
	startFake(t)
	h.await(t, resolved.Registered)
	endBus()
	h.await(t, resolved.Failed)
}

// V5: the switch removes the registration, and an agent that is off is not connected to D-Bus.
func TestOff(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Registered)
	h.off.Store(true)
	h.await(t, resolved.Off)
	if index := h.link(); index != 0 {
		t.Errorf("interface %d stays", index)
	}
	wait.Until(t, "only the bus and the fake are connected", func() bool {
		var names []string
		if err := f.conn.BusObject().Call("org.freedesktop.DBus.ListNames", 0).Store(&names); err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, ":") })) == 1
	})
	h.off.Store(false)
	h.await(t, resolved.Registered)
}

// V5: a systemd-resolved in another network namespace is left alone.
func TestOtherNamespace(t *testing.T) {
	startBus(t)
	f := startFake(t)
	f.refuse(true, false)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Failed)
	if got := h.Status().Error; !strings.Contains(got, "it runs in another network namespace") {
		t.Errorf("the error is %q", got)
	}
	if got := f.taken(); got != "" {
		t.Errorf("calls %q", got)
	}
}

// V5: without the permission, the log says once what to do.
func TestDenied(t *testing.T) {
	startBus(t)
	f := startFake(t)
	f.refuse(false, true)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, resolved.Failed)
	if got := h.Status().Error; !strings.Contains(got, "nametap-resolved.socket") {
		t.Errorf("the error is %q", got)
	}
	f.refuse(false, false)
	h.await(t, resolved.Registered)
	if n := h.log.Count("level=WARN"); n != 1 {
		t.Errorf("%d warnings", n)
	}
}

// V5: without systemd-resolved, the agent does not connect to D-Bus and logs nothing.
func TestWithoutResolved(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "bus")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
	h := start(t, time.Millisecond, filepath.Join(t.TempDir(), "none"))
	h.await(t, resolved.Absent)
	h.end()
	if got := h.log.String(); got != "" {
		t.Errorf("the log: %s", got)
	}
	if err := listener.(*net.UnixListener).SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if conn, err := listener.Accept(); err == nil {
		conn.Close()
		t.Error("the agent has connected to D-Bus")
	}
	_ = listener.Close()
}

// V5: the helper registers the interface of nametap, and refuses every other one.
func TestHelper(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, resolved.Registered)
	ask := func(link int, server, domain string) (answer string) {
		request := fmt.Sprintf(`{"link":%d,"server":%q,"domains":[%q]}`, link, server, domain)
		h.net.Run(func() {
			var out strings.Builder
			_ = resolved.Help(t.Context(), strings.NewReader(request), &out)
			answer = out.String()
		})
		return answer
	}
	index := h.link()
	if got := ask(index, "127.0.0.1:15053", "svc"); got != "ok\n" {
		t.Errorf("the helper answers %s", got)
	}
	if got := f.domains(index); !slices.Equal(got, []string{"svc"}) {
		t.Errorf("the domains are %q", got)
	}
	f.taken()
	for answer, want := range map[string]string{
		ask(index, "192.0.2.1:53", "a"):                         "192.0.2.1 is no address of this host",
		ask(index, "127.0.0.1:0", "a"):                          "want the address and the port of a listener",
		ask(index, "[::1%x]:53", "a"):                           "want the address and the port of a listener",
		ask(1, "127.0.0.1:53", "a"):                             "interface 1 is not nametap-dns",
		ask(index+1, "127.0.0.1:53", "a"):                       "is not nametap-dns",
		ask(index, "127.0.0.1:53", strings.Repeat("a", 200000)): "reading a registration",
	} {
		if !strings.Contains(answer, want) {
			t.Errorf("the helper answers %s, want %q", answer, want)
		}
	}
	if got := f.taken(); got != "" {
		t.Errorf("calls %q", got)
	}
}

// TestForeignLink checks that an interface of another program, with the name of nametap's, is neither
// configured nor deleted. V5.
func TestForeignLink(t *testing.T) {
	startBus(t)
	startFake(t)
	ns := netns.New(t)
	ns.Exec("ip", "link", "add", resolved.LinkName, "type", "bridge")
	h := startIn(t, ns, time.Hour, t.TempDir())
	h.await(t, resolved.Failed)
	if got := h.Status().Error; !strings.Contains(got, "another program has made the interface") {
		t.Errorf("the error is %q", got)
	}
	h.end()
	h.net.Run(func() {
		link, err := net.InterfaceByName(resolved.LinkName)
		if err != nil {
			t.Fatalf("the interface was deleted: %v", err)
		}
		if addrs, err := link.Addrs(); err != nil || len(addrs) > 0 || link.Flags&net.FlagUp != 0 {
			t.Errorf("the interface has %v, %v and %v", addrs, link.Flags, err)
		}
	})
}
