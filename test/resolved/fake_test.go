package resolved_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/prop"

	"github.com/nametap/nametap/internal/testkit/leftout"
)

// Names and types on the bus, from org.freedesktop.resolve1(5).
const (
	serviceName   = "org.freedesktop.resolve1"
	managerPath   = "/org/freedesktop/resolve1"
	linkInterface = serviceName + ".Link"
	noSuchLink    = serviceName + ".NoSuchLink"
)

type server struct {
	Family  int32
	Address []byte
	Port    uint16
	Name    string
}

type domain struct {
	Name        string
	RoutingOnly bool
}

// busConfig lets every user do everything.
const busConfig = `<busconfig><type>system</type><listen>unix:path=%s</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`

// startBus starts a D-Bus daemon, which is the system's for the rest of the test. The function that it
// returns ends the daemon.
func startBus(t *testing.T) (end func()) {
	t.Helper()
	if _, err := exec.LookPath("dbus-daemon"); err != nil {
		leftout.Test(t, "tests with D-Bus: %v; install the package dbus-daemon", err)
	}
	dir := t.TempDir()
	socket, config := filepath.Join(dir, "bus"), filepath.Join(dir, "bus.conf")
	if err := os.WriteFile(config, fmt.Appendf(nil, busConfig, socket), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	daemon := exec.CommandContext(ctx, "dbus-daemon", "--nofork", "--print-address", "--config-file="+config)
	stdout, err := daemon.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		cancel()
		_ = daemon.Wait()
	})
	t.Cleanup(end)
	if address, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatalf("dbus-daemon: %q, %v", address, err)
	}
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
	return end
}

// A fake is a systemd-resolved that knows every interface, unless it is blind.
type fake struct {
	tb   testing.TB
	conn *dbus.Conn

	mu      sync.Mutex
	blind   bool
	deny    bool
	links   map[int32]*prop.Properties
	calls   []string // methods that change something
}

// startFake starts a fake on the system's bus of the test.
func startFake(t *testing.T) *fake {
	t.Helper()
	conn, err := dbus.ConnectSystemBus()
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{tb: t, conn: conn, links: map[int32]*prop.Properties{}}
	t.Cleanup(f.stop)
	methods := map[string]any{
		"GetLink":             f.getLink,
		"SetLinkDomains":      func(index int32, domains []domain) *dbus.Error { return f.set("Domains", index, domains) },
		"SetLinkDNSEx":        func(index int32, servers []server) *dbus.Error { return f.set("DNSEx", index, servers) },
		"SetLinkDefaultRoute": func(index int32, on bool) *dbus.Error { return f.set("DefaultRoute", index, on) },
	}
	for _, mode := range []string{"DNSSEC", "DNSOverTLS", "LLMNR", "MulticastDNS"} {
		methods["SetLink"+mode] = func(index int32, value string) *dbus.Error { return f.set(mode, index, value) }
	}
	if err := conn.ExportMethodTable(methods, managerPath, serviceName+".Manager"); err != nil {
		t.Fatal(err)
	}
	if reply, err := conn.RequestName(serviceName, dbus.NameFlagDoNotQueue); err != nil || reply != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("%v, %v", reply, err)
	}
	return f
}

// refuse makes the fake know no interface, or deny every change.
func (f *fake) refuse(blind, deny bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blind, f.deny = blind, deny
}

func (f *fake) stop() { _ = f.conn.Close() }

// link returns the properties of an interface, which it makes if it is new.
func (f *fake) link(index int32) *prop.Properties {
	if f.links[index] == nil {
		values := prop.Map{linkInterface: {
			"DNSEx": {Value: []server{}}, "Domains": {Value: []domain{}}, "DefaultRoute": {Value: false}, "ScopesMask": {Value: uint64(0)},
			"DNSSEC": {Value: "allow-downgrade"}, "DNSOverTLS": {Value: "yes"}, "LLMNR": {Value: "no"}, "MulticastDNS": {Value: "no"},
		}}
		properties, err := prop.Export(f.conn, linkPath(index), values)
		if err != nil {
			f.tb.Error(err)
		}
		f.links[index] = properties
	}
	return f.links[index]
}

func linkPath(index int32) dbus.ObjectPath {
	return dbus.ObjectPath(fmt.Sprintf("%s/link/%d", managerPath, index))
}

// getLink is a method of systemd-resolved, as are the methods below.
func (f *fake) getLink(index int32) (dbus.ObjectPath, *dbus.Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.blind {
		return "", dbus.NewError(noSuchLink, []any{"Link not known"})
	}
	f.link(index)
	return linkPath(index), nil
}

// set sets a property of an interface.
func (f *fake) set(property string, index int32, value any) *dbus.Error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.deny {
		return dbus.NewError("org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", []any{"Interactive authentication required."})
	}
	f.calls = append(f.calls, property)
	link := f.link(index)
	link.SetMust(linkInterface, property, value)
	link.SetMust(linkInterface, "ScopesMask", uint64(1))
	return nil
}

// taken returns the methods that were called, and forgets them.
func (f *fake) taken() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	calls := strings.Join(f.calls, " ")
	f.calls = nil
	return calls
}

// domains returns the domains of an interface.
func (f *fake) domains(index int) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var names []string
	for _, d := range f.link(int32(index)).GetMust(linkInterface, "Domains").([]domain) {
		names = append(names, d.Name)
	}
	return names
}
