package resolved

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A host is a network namespace with a Registrar.
type host struct {
	*Registrar
	net   *netns.NS
	log   *testlog.Buffer
	names atomic.Pointer[Names]
	// returned has the domains of the last call of Returned.
	returned atomic.Pointer[[]string]
	end      func() // ends Run, and removes the registration
}

// start starts a Registrar that checks every interval. The directory of systemd-resolved is
// dir.
func start(t *testing.T, interval time.Duration, dir string) *host {
	t.Helper()
	h := &host{net: netns.New(t), log: testlog.New(t)}
	h.names.Store(&Names{Required: []string{"cluster.local"}, Domains: []string{"api.example.com"}, Fingerprint: 1})
	h.Registrar = New(Config{
		Server:   func() netip.AddrPort { return netip.MustParseAddrPort("127.0.0.1:15053") },
		Names:    func() Names { return *h.names.Load() },
		Returned: func(domains []string) { h.returned.Store(&domains) }, Interval: interval, Logger: h.log.Logger(),
		dir: dir, helper: filepath.Join(dir, "helper"), pause: 10 * time.Millisecond,
	})
	h.Set(true)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		h.net.Run(func() {
			h.Run(ctx)
			if err := h.Remove(context.WithoutCancel(ctx)); err != nil {
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
	h.net.Run(func() { index, _ = findLink() })
	return index
}

func (h *host) await(t *testing.T, state State) {
	t.Helper()
	wait.Until(t, "the registration is "+string(state), func() bool { return h.Status().State == state })
}

// V5: the agent registers a nameserver for the domains of the mesh, and leaves nothing behind.
func TestRegister(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, Registered)
	if got := f.taken(); got != "DNSSEC DNSOverTLS LLMNR MulticastDNS DefaultRoute Domains DNSEx" {
		t.Errorf("the calls are %q", got)
	}
	index := h.link()
	if got := f.domains(index); !slices.Equal(got, []string{"cluster.local", "api.example.com"}) {
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
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.flushes != 2 {
		t.Errorf("%d flushes, want one after the registration and one after its end", f.flushes)
	}
}

// V5: other names change the registration. Only what differs is set, and a change of all
// domains does not exceed the limit of systemd-resolved meanwhile.
func TestNamesChange(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, Registered)
	f.taken()
	names := Names{Required: []string{"cluster.local"}, Fingerprint: 2}
	for i := range 300 {
		names.Domains = append(names.Domains, fmt.Sprintf("a%d.example.com", i))
	}
	for round := uint64(3); round < 5; round++ {
		for i := range names.Domains {
			names.Domains[i] = fmt.Sprintf("%c%s", 'a'+round, names.Domains[i][1:])
		}
		names.Fingerprint = round
		current := names
		current.Domains = slices.Clone(names.Domains)
		h.names.Store(&current)
		h.Note()
		wait.Until(t, "the domains have changed", func() bool {
			got := f.domains(h.link())
			return len(got) == maxDomains && strings.HasPrefix(got[1], string(rune('a'+round)))
		})
	}
	if got := f.taken(); strings.Trim(got, "Domains ") != "" {
		t.Errorf("the calls are %q", got)
	}
	wait.Until(t, "the status is complete", func() bool { return h.Status() == Status{State: Registered, Domains: 256, Others: 45} })
}

// V5: a registration that another program changes, or whose interface is deleted, is repaired.
func TestRepair(t *testing.T) {
	startBus(t)
	f := startFake(t)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, Registered)
	if err := f.SetLinkDNSEx(int32(h.link()), nil); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the nameserver is repaired", func() bool { return h.Status().Repairs == 1 })
	previous := h.link()
	h.net.Exec("ip", "link", "delete", LinkName)
	wait.Until(t, "the interface is repaired", func() bool { return h.Status().Repairs == 2 })
	if index := h.link(); index == 0 || index == previous {
		t.Errorf("the index was %d and is %d", previous, index)
	}
}

// V5: after systemd-resolved starts, or restarts without its settings, the agent registers at
// once.
func TestResolvedRestarts(t *testing.T) {
	startBus(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, Absent)
	f := startFake(t)
	h.await(t, Registered)
	f.stop()
	h.await(t, Absent)
	startFake(t)
	h.await(t, Registered)
}

// V5: the switch removes the registration while the agent runs, and makes it again.
func TestSwitch(t *testing.T) {
	startBus(t)
	startFake(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, Registered)
	h.Set(false)
	h.await(t, Off)
	if index := h.link(); index != 0 {
		t.Errorf("interface %d stays", index)
	}
	h.Set(true)
	h.await(t, Registered)
}

// TestOffWithoutBus checks that a Registrar that is off is not connected to D-Bus, and does nothing when
// D-Bus ends. It used to select the closed channel of its connection for ever. V5.
func TestOffWithoutBus(t *testing.T) {
	endBus := startBus(t)
	f := startFake(t)
	connections := func() int {
		var names []string
		if err := f.conn.BusObject().Call("org.freedesktop.DBus.ListNames", 0).Store(&names); err != nil {
			t.Fatal(err)
		}
		return len(slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, ":") }))
	}
	h := start(t, time.Hour, t.TempDir())
	h.await(t, Registered)
	before := connections()
	h.Set(false)
	h.await(t, Off)
	wait.Until(t, "the Registrar leaves D-Bus", func() bool { return connections() == before-1 })
	endBus()
	h.Set(true)
	h.await(t, Failed)
}

// TestBusEnds checks that a Registrar notices the end of D-Bus, and tries again after its interval only. V5.
func TestBusEnds(t *testing.T) {
	endBus := startBus(t)
	startFake(t)
	h := start(t, time.Hour, t.TempDir())
	h.await(t, Registered)
	endBus()
	h.await(t, Failed)
}

// V5: a systemd-resolved in another network namespace is left alone.
func TestOtherNamespace(t *testing.T) {
	startBus(t)
	f := startFake(t)
	f.refuse(true, false)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, Failed)
	if got := h.Status().Error; got != errUnknownLink.Error() {
		t.Errorf("the error is %q", got)
	}
	if got := f.taken(); got != "" || h.link() != 0 {
		t.Errorf("calls %q, interface %d", got, h.link())
	}
}

// V5: without the permission, the log says once what to do.
func TestDenied(t *testing.T) {
	startBus(t)
	f := startFake(t)
	f.refuse(false, true)
	h := start(t, 10*time.Millisecond, t.TempDir())
	h.await(t, Failed)
	if got := h.Status().Error; !strings.Contains(got, "nametap-resolved.socket") {
		t.Errorf("the error is %q", got)
	}
	f.refuse(false, false)
	h.await(t, Registered)
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
	h.await(t, Absent)
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
	ns := netns.New(t)
	ask := func(request string) (answer string) {
		ns.Run(func() {
			var out strings.Builder
			_ = Help(t.Context(), strings.NewReader(request), &out)
			answer = out.String()
		})
		return answer
	}
	if got := ask(`{"server":"127.0.0.1:15053"}`); !strings.Contains(got, "interface 0 is not nametap-dns") {
		t.Errorf("without the interface, the helper answers %s", got)
	}
	var index int
	ns.Run(func() {
		var err error
		if index, err = makeLink(); err != nil {
			t.Error(err)
		}
	})
	const request = `{"link":%d,"server":"127.0.0.1:15053","domains":["cluster.local"]}`
	if got := ask(fmt.Sprintf(request, index)); got != "{}\n" {
		t.Errorf("the helper answers %s", got)
	}
	if got := f.domains(index); !slices.Equal(got, []string{"cluster.local"}) {
		t.Errorf("the domains are %q", got)
	}
	f.taken()
	of := func(server, domain string) string {
		return fmt.Sprintf(`{"link":%d,"server":%q,"domains":[%q]}`, index, server, domain)
	}
	for _, refused := range []string{
		of("192.0.2.1:53", "a"), of("127.0.0.1:0", "a"), of("[::1%x]:53", "a"), of("127.0.0.1:53", "a\nb"),
		of("127.0.0.1:53", strings.Repeat("a", 254)), fmt.Sprintf(request, 1), fmt.Sprintf(request, index+1), "{}", "", "[", `{"link":"x"}`, strings.Repeat("[", maxRegistration),
	} {
		if got := ask(refused); !strings.Contains(got, `"error"`) {
			t.Errorf("the helper answers %s", got)
		}
	}
	if got := f.taken(); got != "" {
		t.Errorf("calls %q", got)
	}
}

// TestForeignLink checks that an interface of another program, with the name of nametap's, is neither
// configured nor deleted. V5.
func TestForeignLink(t *testing.T) {
	ns := netns.New(t)
	ns.Exec("ip", "link", "add", LinkName, "type", "bridge")
	ns.Run(func() {
		if _, err := makeLink(); !errors.Is(err, errForeign) {
			t.Errorf("the interface is taken: %v", err)
		}
		if err := RemoveLink(); err != nil {
			t.Error(err)
		}
		link, err := net.InterfaceByName(LinkName)
		if err != nil {
			t.Fatalf("the interface was deleted: %v", err)
		}
		if addrs, err := link.Addrs(); err != nil || len(addrs) > 0 || link.Flags&net.FlagUp != 0 {
			t.Errorf("the interface has %v, %v and %v", addrs, link.Flags, err)
		}
	})
}

// V5: an agent that is not root asks the helper, and gets its error.
func TestAskHelper(t *testing.T) {
	path := filepath.Join(t.TempDir(), "helper")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_ = Help(t.Context(), conn, conn)
	}()
	err = askHelper(t.Context(), path, Registration{Link: 1, Server: netip.MustParseAddrPort("127.0.0.1:1")})
	if err == nil || !strings.Contains(err.Error(), "interface 1 is not nametap-dns") {
		t.Errorf("the error is %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if exists(path) {
		t.Error("there is a helper without a socket")
	}
}

// TestDue checks that a Registrar without a registration does nothing until the next check. It used to
// try again at once, for ever.
func TestDue(t *testing.T) { // V5
	for _, on := range []bool{false, true} {
		r := New(Config{
			Returned: func([]string) {}, Interval: time.Hour, Logger: slog.New(slog.DiscardHandler),
			dir: filepath.Join(t.TempDir(), "absent"),
		})
		r.Set(on)
		netns.New(t).Run(func() { // without the interface of another agent
			if status, err := r.sync(t.Context()); err != nil || status.State == Registered {
				t.Fatalf("on %v: %+v, %v", on, status, err)
			}
		})
		for _, ago := range []time.Duration{0, time.Minute} { // names were read for a registration that is gone
			if ago > 0 {
				r.read = time.Now().Add(-ago)
			}
			if due := r.due(); due != time.Hour {
				t.Errorf("on %v: the next check is due in %v, want the interval", on, due)
			}
		}
	}
}

// TestFirstNames checks that the names of the first table are read at once, and later ones after the pause.
func TestFirstNames(t *testing.T) { // V5
	reads := 0
	r := New(Config{
		Names: func() Names {
			reads++
			return Names{Required: []string{"cluster.local"}, Fingerprint: uint64(reads - 1)} // 0: no table yet
		},
		Returned: func([]string) {}, Interval: time.Minute, Logger: slog.New(slog.DiscardHandler), pause: time.Hour,
	})
	for i, want := range []int{1, 2, 2} {
		r.Note()
		r.readNames()
		if reads != want {
			t.Errorf("after change %d: %d reads, want %d", i, reads, want)
		}
	}
}
