package vm

import (
	"cmp"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// A rewriter is a program of Debian that writes resolv.conf.
type rewriter struct {
	name     string
	packages []string
	path     string            // of the file with the nameservers, unless it is resolv.conf
	files    map[string]string // its settings
	prepare  string            // shell commands that start it
	// use returns shell commands after which resolv.conf names the nameserver. dhcp, if set,
	// is called before them.
	use  func(server string) string
	dhcp func(t *testing.T, m *lab.Machine) func(server string)
}

// rewriters returns the rewriters that V6 is tested with.
func rewriters() []rewriter {
	networkManager := func(mode string) rewriter {
		return rewriter{
			name: "NetworkManager-" + mode, packages: []string{"network-manager"},
			files: map[string]string{"/etc/NetworkManager/conf.d/test.conf": "[main]\nrc-manager=" + mode +
				"\n[keyfile]\nunmanaged-devices=interface-name:host0\n"},
			prepare: "systemctl restart NetworkManager\n" +
				"nmcli connection add type bridge ifname site bridge.stp no con-name site ipv4.method manual ipv4.addresses 10.8.0.1/24 ipv4.dns " + lab.Named,
			use: func(server string) string {
				return "nmcli connection modify site ipv4.dns " + server + " && nmcli connection up site"
			},
		}
	}
	networkd := func(name, target string) rewriter {
		return rewriter{
			name: "resolved-" + name, packages: []string{"systemd-resolved"}, path: "/run/systemd/resolve/resolv.conf",
			prepare: "ln -sf " + target + " /etc/resolv.conf\n" +
				"systemctl restart systemd-resolved",
			// `networkctl reconfigure` would also remove the address for a moment.
			use: func(server string) string { return "resolvectl dns host0 " + server },
		}
	}
	return []rewriter{
		{name: "in place", use: func(server string) string { return "echo nameserver " + server + " >/etc/resolv.conf" }},
		{name: "missing for 3 s", use: func(server string) string {
			return "rm /etc/resolv.conf; sleep 3; echo nameserver " + server + " >/etc/resolv.conf"
		}},
		networkManager("symlink"),
		{
			name: "dhclient", packages: []string{"isc-dhcp-client"}, dhcp: startDHCP,
			use: func(string) string {
				return "if test -e /run/dhclient.pid; then kill -9 $(cat /run/dhclient.pid); fi; dhclient -v -1 host0"
			},
		},
		{
			name: "resolvconf", packages: []string{"resolvconf"},
			prepare: "ln -sf /run/resolvconf/resolv.conf /etc/resolv.conf",
			use:     func(server string) string { return "echo nameserver " + server + " | resolvconf -a host0.site" },
		},
		{
			name: "openresolv", packages: []string{"openresolv"},
			use: func(server string) string { return "echo nameserver " + server + " | resolvconf -a host0.site" },
		},
		networkd("uplink", "/run/systemd/resolve/resolv.conf"),
	}
}

// startDHCP returns a function that starts a DHCP server, which gives the machine its address and
// a nameserver, in place of the previous one.
func startDHCP(t *testing.T, m *lab.Machine) func(server string) {
	t.Helper()
	dir := t.TempDir()
	end := func() {}
	t.Cleanup(func() { end() })
	return func(server string) {
		t.Helper()
		end()
		cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--interface=vm0", "--bind-interfaces",
			"--dhcp-range="+lab.Self+","+lab.Self+",255.255.255.0,2m", "--dhcp-authoritative", "--no-ping", "--user=root",
			"--dhcp-option=option:router,10.0.0.2", "--dhcp-option=option:dns-server,"+server,
			"--dhcp-leasefile="+filepath.Join(dir, "leases"), "--pid-file=")
		if err := m.World.Start(cmd); err != nil {
			t.Fatal(err)
		}
		end = func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
}

// TestResolvConfRewritten has each program change the nameserver in resolv.conf, under load. The
// new nameserver is in use within 1 s of the change. Before, after and during the change every
// query has an answer from the nameserver that resolv.conf named. V6.
func TestResolvConfRewritten(t *testing.T) {
	for _, r := range rewriters() {
		t.Run(r.name, func(t *testing.T) { r.test(t) })
	}
}

func (r rewriter) test(t *testing.T) {
	t.Helper()
	m := lab.Boot(t, lab.Packages(r.packages...))
	for path, text := range r.files {
		m.Write(path, text)
	}
	if r.prepare != "" {
		m.Run("sh", "-euc", r.prepare)
	}
	serve := func(string) {}
	if r.dhcp != nil {
		serve = r.dhcp(t, m)
	}
	use := func(server string) {
		t.Helper()
		serve(server)
		m.Run("sh", "-euc", r.use(server))
	}
	use(lab.Named)
	root, path := m.Root(), cmp.Or(r.path, "/etc/resolv.conf")
	wait.Until(t, "resolv.conf names "+lab.Named, func() bool { return named(root, path) == lab.Named })
	m.Install()
	m.Start()
	l := startForwarded(t, m)
	for _, to := range []string{lab.Other, lab.Named} {
		if err := l.Expect(answersOf(lab.Named), answersOf(lab.Other)); err != nil {
			t.Fatal(err)
		}
		noticed := make(chan time.Time, 1)
		go func() { // the program may return late
			for named(root, path) != to {
				if t.Context().Err() != nil {
					return
				}
				time.Sleep(time.Millisecond) //nolint:forbidigo // the file may have any kind of change
			}
			noticed <- time.Now()
		}()
		use(to)
		changed := wait.For(t, "resolv.conf names "+to, noticed)
		wait.Until(t, "the agent forwards to "+to, func() bool {
			return m.Net.Ask(lab.AgentDNS, "www."+time.Now().Format("150405.000000000")+".example", "A") == ip(to)
		})
		took := time.Since(changed)
		if err := l.Expect(answersOf(to)); err != nil {
			t.Fatal(err)
		}
		right := l.Report().Count(load.Right)
		wait.Until(t, "queries have answers", func() bool { return l.Report().Count(load.Right) > right+forwardedRate })
		t.Logf("%s is in use %v after resolv.conf names it", to, took.Round(10*time.Millisecond))
		if took > followLimit {
			t.Errorf("%s is in use %v after resolv.conf names it", to, took)
		}
	}
	report := l.Stop()
	t.Logf("%d queries, %d right", report.Queries, report.Count(load.Right))
	if report.Bad() > 0 {
		t.Errorf("%v", report)
	}
}

const (
	// forwardedRate is the number of forwarded queries a second. Each has a name of its own.
	forwardedRate = 500
	// followLimit is the 1 s of V6, and what a busy machine takes to notice.
	followLimit = 2500 * time.Millisecond
)

// startForwarded starts queries that the agent forwards. They are sent to its listener, and so follow resolv.conf: captured
// queries for a nameserver that it does not name go to that nameserver.
func startForwarded(t *testing.T, m *lab.Machine) *load.Load {
	t.Helper()
	l, err := load.Start(load.Config{
		Server: netip.MustParseAddrPort(lab.AgentDNS), Rate: forwardedRate, Kept: 0.2, TCP: 0.05, Enter: m.Net.Run,
		Expect: answersOf(lab.Named),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	return l
}

// answersOf returns the answers while a nameserver is in use.
func answersOf(server string) *load.Expectation {
	return &load.Expectation{Questions: []load.Question{
		{Name: "*.example.org", Addresses: load.Addrs(ip(server))},
		{Name: lab.Mesh, Addresses: load.Addrs(lab.MeshIP)},
	}}
}

// ip returns the address that a nameserver answers with.
func ip(server string) string {
	if server == lab.Other {
		return lab.OtherIP
	}
	return lab.NamedIP
}

// named returns the nameserver that a resolv.conf of the machine names, "" if none.
func named(root, path string) string {
	for range 4 { // links
		target, err := os.Readlink(root + path)
		if err != nil {
			break
		}
		if path = target; !filepath.IsAbs(target) {
			path = filepath.Join("/etc", target)
		}
	}
	text, _ := os.ReadFile(root + path) // none while it is replaced
	for line := range strings.Lines(string(text)) {
		if server, ok := strings.CutPrefix(line, "nameserver "); ok {
			return strings.TrimSpace(server)
		}
	}
	return ""
}
