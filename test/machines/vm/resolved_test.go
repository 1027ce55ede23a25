package vm

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// The hosts of the mesh besides lab.Mesh, with their addresses.
const (
	external, externalIP = "api.example.com", "10.1.0.2"
	wildcard, wildcardIP = "*.wild.example", "10.1.0.3"
	local, localIP       = "db.shop.local", "10.1.0.4"
	global, globalIP     = "cart.shop.global", "10.1.0.5"
)

// outside is a name that the mesh does not have.
const outside = "www.example.org"

// table returns the table of the mesh.
func table() *api.NameTable {
	hosts := map[string]*api.NameTable_NameInfo{
		lab.Mesh: {Ips: []string{lab.MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}
	for host, ip := range map[string]string{external: externalIP, wildcard: wildcardIP, local: localIP, global: globalIP} {
		hosts[host] = &api.NameTable_NameInfo{Ips: []string{ip}, Registry: "External"}
	}
	return &api.NameTable{Table: hosts}
}

// meshNames returns names of the mesh with their addresses: hosts, and short names by themselves
// and with the search domain.
func meshNames() map[string]string {
	return map[string]string{
		lab.Mesh: lab.MeshIP, external: externalIP, "a.b.wild.example": wildcardIP, local: localIP, global: globalIP,
		"web": lab.MeshIP, "web.shop": lab.MeshIP, "web.shop.svc": lab.MeshIP, "web.corp.example": lab.MeshIP,
	}
}

// A resolvedMachine is a machine with systemd-resolved.
type resolvedMachine struct {
	*lab.Machine
	t *testing.T
}

// bootResolved boots a machine whose programs use systemd-resolved, with more packages, and
// starts the agent.
func bootResolved(t *testing.T, packages ...string) *resolvedMachine {
	t.Helper()
	m := &resolvedMachine{t: t, Machine: lab.Boot(t, lab.Packages(append(packages, "systemd-resolved", "libnss-resolve")...))}
	m.Run("ln", "-sf", "/run/systemd/resolve/stub-resolv.conf", "/etc/resolv.conf")
	m.World.Control.Push(table())
	m.Run("resolvectl", "dns", "host0", lab.Named)
	m.Run("resolvectl", "domain", "host0", "corp.example")
	m.Install()
	m.Start()
	m.awaitRegistered()
	return m
}

// awaitRegistered returns when the agent reports its registration.
func (m *resolvedMachine) awaitRegistered() {
	m.t.Helper()
	wait.Until(m.t, "the agent is registered with systemd-resolved", func() bool {
		status, err := m.Try("nametap", "status")
		return err == nil && strings.Contains(status, "systemd-resolved  registered, ")
	})
}

// ways are the ways to ask systemd-resolved, by their name: the commands, without the name to
// look up.
func ways() map[string][]string {
	return map[string][]string{
		"nss-resolve": {"getent", "-s", "resolve", "ahostsv4"},
		"D-Bus": {"busctl", "call", "org.freedesktop.resolve1", "/org/freedesktop/resolve1", "org.freedesktop.resolve1.Manager",
			"ResolveHostname", "isit", "0", "NAME", "2", "0"},
		"varlink": {"resolvectl", "query", "-4"},
		"libc":    {"getent", "-s", "dns", "ahostsv4"},
	}
}

// ask looks a name up in one of the ways, and returns what the command prints.
func (m *resolvedMachine) ask(way, name string) string {
	m.t.Helper()
	command, placed := append([]string{}, ways()[way]...), false
	for i, arg := range command {
		if arg == "NAME" {
			command[i], placed = name, true
		}
	}
	if !placed {
		command = append(command, name)
	}
	output, err := m.Try(command[0], command[1:]...)
	if err != nil {
		return strings.TrimSpace(output) + ": " + err.Error()
	}
	return output
}

// has reports whether a lookup in one of the ways gives an address.
func (m *resolvedMachine) has(way, name, ip string) bool {
	m.t.Helper()
	if way == "D-Bus" {
		ip = strings.ReplaceAll(ip, ".", " ") // as busctl prints it
	}
	return strings.Contains(m.ask(way, name), ip)
}

// check looks names up in all ways.
func (m *resolvedMachine) check(names map[string]string) {
	m.t.Helper()
	for way := range ways() {
		for name, ip := range names {
			if !m.has(way, name, ip) {
				m.t.Errorf("%s: %s has %q, want %s", way, name, m.ask(way, name), ip)
			}
		}
	}
}

// checkRemoved checks that nothing of nametap is left in systemd-resolved and on the machine.
func (m *resolvedMachine) checkRemoved() {
	m.t.Helper()
	for _, command := range []string{"ip link show", "resolvectl status", "ls -R /run/systemd/resolve /run/systemd/netif"} {
		if got := m.Run("sh", "-c", command+" 2>/dev/null || true"); strings.Contains(got, "nametap") || strings.Contains(got, "127.0.0.1:15053") {
			m.t.Errorf("%s prints:\n%s", command, got)
		}
	}
	if links := m.Run("sh", "-c", "ls /run/systemd/resolve/netif | wc -l"); strings.TrimSpace(links) != "1" { // the file of host0
		m.t.Errorf("systemd-resolved has saved %s interfaces, want 1", links)
	}
	m.check(map[string]string{outside: lab.NamedIP})
	if got := m.ask("varlink", local); !strings.Contains(got, "No appropriate name servers") {
		m.t.Errorf("%s has %q", local, got)
	}
}

// V5, F6: see the subtests, which share a machine on which polkit decides which users may change what.
func TestResolved(t *testing.T) {
	m := bootResolved(t, "polkitd")
	for _, sub := range []struct {
		name string
		test func(m *resolvedMachine)
	}{
		{"restarts", (*resolvedMachine).testRestarts}, {"loop", (*resolvedMachine).testNoLoop}, {"no agent", (*resolvedMachine).testWithoutAgent}, {"networkd and DNSSEC", (*resolvedMachine).testNetworkdAndDNSSEC},
	} {
		m.Sub(t, sub.name, func(t *testing.T) { sub.test(&resolvedMachine{t: t, Machine: m.Machine}) })
	}
}

// testRestarts checks that programs that ask systemd-resolved find mesh names, over restarts of systemd-resolved and of
// the agent, and that nothing is left when the agent ends.
func (m *resolvedMachine) testRestarts() {
	t := m.t
	m.check(meshNames())
	m.check(map[string]string{outside: lab.NamedIP})
	if got := m.Run("getent", "hosts", externalIP); !strings.Contains(got, external) {
		t.Errorf("%s has the name %q, want %s", externalIP, got, external)
	}

	m.Run("systemctl", "restart", "systemd-resolved")
	m.check(meshNames()) // at once: systemd-resolved has saved the registration

	m.Run("systemctl", "restart", "nametap.service")
	m.awaitRegistered()
	m.check(meshNames())

	m.Run("systemctl", "kill", "--signal=KILL", "nametap.service")
	m.awaitRegistered()
	m.check(meshNames())

	m.Run("systemctl", "reload", "nametap.service")
	m.check(meshNames())

	m.Systemctl("stop")
	m.checkRemoved()
	m.Systemctl("start")
	m.awaitRegistered()
	m.check(meshNames())
}

// testNoLoop makes the stub of systemd-resolved the agent's only nameserver: names of the mesh's domains that the mesh does
// not have fail at once. They do not circle between the two.
func (m *resolvedMachine) testNoLoop() {
	t := m.t
	m.Run("resolvectl", "dns", "host0", "")
	m.Run("systemctl", "restart", "nametap.service") // a running agent keeps its nameservers
	m.awaitRegistered()
	wait.Until(t, "the agent's nameserver is the stub", func() bool {
		return strings.Contains(m.Run("nametap", "status"), "127.0.0.53")
	})
	m.check(map[string]string{lab.Mesh: lab.MeshIP, local: localIP})
	for way := range ways() {
		for _, name := range []string{"none.shop.svc.cluster.local", "none." + external, "none.shop.local"} {
			begin := time.Now()
			got := m.ask(way, name)
			took := time.Since(begin)
			if took > 2*time.Second || strings.Contains(got, "10.1.0.") {
				t.Errorf("%s: %s takes %v and has %q", way, name, took, got)
			}
		}
	}
	if status := m.Run("nametap", "status"); strings.Contains(status, "looping") {
		t.Errorf("nametap status prints:\n%s", status)
	}
	m.Run("resolvectl", "dns", "host0", lab.Named)
	m.Run("systemctl", "restart", "nametap.service")
	m.awaitRegistered()
}

// testWithoutAgent checks that the registration ends with the capture rules when no agent can start.
func (m *resolvedMachine) testWithoutAgent() {
	t := m.t
	m.Write("/etc/default/nametap", "NAMETAP_TTL=none\n")
	if output, err := m.Try("systemctl", "restart", "nametap.service"); err == nil {
		t.Fatalf("the agent has started: %s", output)
	}
	wait.Until(t, "the interface is deleted", func() bool {
		_, err := m.Try("ip", "link", "show", "nametap-dns")
		return err != nil
	})
	m.Systemctl("stop")
	m.checkRemoved()
	m.Configure()
	m.Systemctl("start")
	m.awaitRegistered()
}

// testNetworkdAndDNSSEC checks that neither systemd-networkd that manages all interfaces nor DNSSEC is in the way. Names that
// are not registered are validated, so DNSSEC=yes denies them.
func (m *resolvedMachine) testNetworkdAndDNSSEC() {
	t := m.t
	registered := meshNames()
	for _, other := range []string{"web", "web.shop", "web.corp.example", external, "a.b.wild.example", global} {
		delete(registered, other)
	}
	for _, mode := range []string{"yes", "allow-downgrade"} {
		m.Write("/etc/systemd/resolved.conf.d/dnssec.conf", "[Resolve]\nDNSSEC="+mode+"\n")
		m.Run("systemctl", "restart", "systemd-resolved")
		m.check(registered)
	}
	m.Write("/etc/systemd/network/80-all.network",
		"[Match]\nType=ether\n[Network]\nLinkLocalAddressing=ipv6\nKeepConfiguration=yes\nDNS="+lab.Named+"\nDomains=corp.example\n")
	for range 2 { // with networkd first, and with nametap first
		m.Run("systemctl", "restart", "systemd-networkd")
		wait.Until(t, "systemd-networkd is ready", func() bool {
			return strings.Contains(m.Run("networkctl", "status", "host0"), "80-all.network")
		})
		if got := m.Run("networkctl", "list", "nametap-dns"); !strings.Contains(got, "unmanaged") {
			t.Errorf("networkctl list prints:\n%s", got)
		}
		m.check(registered)
		m.Systemctl("stop")
		m.Systemctl("start")
		m.awaitRegistered()
		m.check(registered)
	}
}
