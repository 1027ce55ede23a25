package vm

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// A firewall is a program of Debian that changes the rules of the kernel.
type firewall struct {
	name     string
	packages []string
	files    map[string]string // its settings
	prepare  string            // shell commands after the machine has booted; the firewall must be off then
	has      string            // what the rules have while the firewall is on
	steps    []string          // shell commands; the first one switches it on
}

// firewalls returns the firewalls that V8 is tested with.
func firewalls() []firewall {
	return []firewall{
		{
			name: "firewalld", packages: []string{"firewalld"}, has: "FWD_public",
			prepare: "systemctl stop firewalld && firewall-offline-cmd --zone=public --add-masquerade",
			steps: []string{
				"systemctl start firewalld && firewall-cmd --state", "firewall-cmd --reload",
				"firewall-cmd --complete-reload", "systemctl stop firewalld",
			},
		},
		{
			name: "ufw", packages: []string{"ufw"}, has: "ufw-user-input",
			prepare: "ufw allow 22/tcp",
			steps: []string{
				"ufw --force enable", "ufw reload", "ufw allow 80/tcp", "ufw delete allow 80/tcp", "ufw disable",
			},
		},
		{
			name: "nftables.service", has: "hook input",
			files: map[string]string{"/etc/nftables.conf": `#!/usr/sbin/nft -f
flush ruleset
table inet filter {
	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		iifname "lo" accept
		tcp dport 22 accept
	}
	chain output {
		type filter hook output priority filter; policy accept;
	}
}
table inet nat {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.9.0.0/24 masquerade
	}
}
`},
			steps: []string{
				"systemctl start nftables", "systemctl reload nftables", "systemctl stop nftables",
			},
		},
		{
			name: "docker", packages: []string{"docker.io"}, has: "-o docker0",
			prepare: "systemctl stop docker.socket docker; ip link delete docker0 || true; nft flush ruleset",
			steps: []string{
				"systemctl reset-failed; systemctl start docker", "docker network create --opt com.docker.network.bridge.name=site site",
				"systemctl reset-failed; systemctl restart docker", "docker network rm site", "systemctl stop docker.socket docker",
			},
		},
	}
}

// persistent returns the rules that netfilter-persistent restores.
func persistent(network string) string {
	return `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -s ` + network + ` -j MASQUERADE
COMMIT
*filter
:INPUT DROP [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:SITE - [0:0]
-A INPUT -i lo -j ACCEPT
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -j SITE
-A SITE -p tcp -m tcp --dport 22 -j ACCEPT
COMMIT
`
}

// mendLimit is when the test gives up to wait for rules. The agent checks its rules every 5 s.
const mendLimit = 6 * time.Second

// TestFirewalls starts, reloads and stops each firewall while nametap runs, and nametap while the
// firewall runs. nametap's rules are repaired within 5 s. The firewall has the
// same rules as without nametap, and nothing of nametap's is left at its end. V8.
func TestFirewalls(t *testing.T) {
	for _, f := range firewalls() {
		t.Run(f.name, func(t *testing.T) { f.test(t) })
	}
}

func (f firewall) test(t *testing.T) {
	t.Helper()
	m := lab.Boot(t, lab.Packages(f.packages...))
	// A firewall may switch it on, which a container may not.
	m.Net.Exec("sysctl", "-qw", "net.ipv4.ip_forward=1")
	for path, text := range f.files {
		m.Write(path, text)
	}
	if f.prepare != "" {
		m.Run("sh", "-euc", f.prepare)
	}
	clear := func() {
		_, _ = m.Try("sh", "-euc", f.steps[len(f.steps)-1]) // fails if the firewall is off
		m.Run("sh", "-euc", "nft flush ruleset; ip link delete docker0 2>/dev/null || true; ip link delete site 2>/dev/null || true")
	}
	clear()
	var alone []string // its rules after each step without nametap
	for _, step := range f.steps {
		m.Run("sh", "-euc", step)
		alone = append(alone, all(m))
	}
	if !strings.Contains(alone[0], f.has) {
		t.Fatalf("the firewall is off:\n%s", alone[0])
	}
	m.Install()

	m.Sub(t, "after", func(t *testing.T) { // the firewall starts after nametap
		clear()
		m.Start()
		r := repairs{t: t, m: m, rules: own(m)}
		if r.rules == "" {
			t.Fatal("nametap has no rules")
		}
		for i, step := range f.steps {
			r.after(step, others(alone[i]))
		}
		m.Systemctl("stop")
		wantEnd(t, all(m), alone[len(alone)-1])
	})
	m.Sub(t, "before", func(t *testing.T) { // the firewall starts before nametap
		clear()
		m.Run("sh", "-euc", f.steps[0])
		m.Systemctl("start")
		m.AwaitMesh()
		wantRules(t, "beside nametap", others(all(m)), others(alone[0]))
		m.Systemctl("stop")
		wantEnd(t, all(m), alone[0])
	})
}

// repairs measures how long nametap takes to repair its rules.
type repairs struct {
	t     *testing.T
	m     *lab.Machine
	rules string // nametap's
}

// after runs a step of the firewall while programs look up names, and waits until nametap's rules
// are repaired. Firewalls discard packets while they reload, so queries may be lost meanwhile.
func (r repairs) after(step, theirs string) {
	r.t.Helper()
	l, err := load.Start(load.Config{
		Server: netip.AddrPortFrom(netip.MustParseAddr(lab.Named), 53), Rate: 200, Kept: 0.2, Enter: r.m.Net.Run,
		Expect: &load.Expectation{
			Questions: []load.Question{{Name: lab.Mesh, Addresses: load.Addrs(lab.MeshIP)}},
			Foreign:   []netip.Prefix{netip.MustParsePrefix(lab.NamedIP + "/32")},
		},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	defer l.Stop()
	r.m.Run("sh", "-euc", step)
	began := time.Now()
	for own(r.m) != r.rules && time.Since(began) < 2*mendLimit {
		r.m.Lookup(lab.Mesh)
	}
	took := time.Since(began)
	wantRules(r.t, "repaired after "+step, own(r.m), r.rules)
	wait.Until(r.t, "after "+step+" all answers are nametap's", func() bool {
		l.Cut()
		right := l.Report().Count(load.Right)
		wait.Until(r.t, "queries have answers", func() bool { return l.Report().Count(load.Right) > right+100 })
		return l.Cut().Bad() == 0
	})
	report := l.Stop()
	r.t.Logf("%s: repaired %v after its end; %v", step, took.Round(10*time.Millisecond), report)
	if took > mendLimit {
		r.t.Errorf("after %s the rules of nametap were repaired after %v", step, took)
	}
	if report.Count(load.Failed, load.Wrong) > 0 {
		r.t.Errorf("during %s: %v", step, report)
	}
	wantRules(r.t, "after "+step, others(all(r.m)), theirs)
}

// all returns all rules of the machine, without counters, as iptables and nft list them.
func all(m *lab.Machine) string {
	return m.Net.Rules() + "== nft\n" + m.Net.Exec("nft", "--stateless", "list", "ruleset")
}

// own returns nametap's rules, as iptables-save prints them.
func own(m *lab.Machine) string {
	return tables(m.Net.Rules(), func(line string) bool { return strings.Contains(line, "NAMETAP") })
}

// others returns the rules and chains among all that are not nametap's, from iptables, and the
// tables of nft that iptables does not show. Built-in chains count only if they have a rule or a
// policy of their own.
func others(all string) string {
	iptables, nft, _ := strings.Cut(all, "== nft\n")
	native := strings.SplitAfter(nft, "\n}\n")
	native = slices.DeleteFunc(native, func(table string) bool {
		return strings.HasPrefix(table, "table ip ") || strings.HasPrefix(table, "table ip6 ")
	})
	return tables(iptables, func(line string) bool {
		builtin := strings.HasPrefix(line, ":") && strings.Contains(line, " ACCEPT")
		return !strings.Contains(line, "NAMETAP") && !builtin && line != "COMMIT\n"
	}) + strings.TrimSpace(strings.Join(native, ""))
}

// tables returns the lines of iptables-save that match, by table and chain. New tables and chains
// come last in the output of iptables-save, so both are sorted; the order of a chain's rules is
// kept.
func tables(saved string, match func(line string) bool) string {
	tool, table := "", ""
	lines := map[string][]string{}
	for line := range strings.Lines(saved) {
		switch {
		case strings.HasPrefix(line, "=="):
			tool = strings.TrimSpace(line)
		case strings.HasPrefix(line, "*"):
			table = tool + " " + line
		case match(line):
			lines[table] = append(lines[table], line)
		}
	}
	var text strings.Builder
	for _, table := range slices.Sorted(maps.Keys(lines)) {
		slices.SortStableFunc(lines[table], func(a, b string) int { return strings.Compare(chainOf(a), chainOf(b)) })
		text.WriteString(table + strings.Join(lines[table], ""))
	}
	return text.String()
}

// chainOf returns the chain of a line, in a form that sorts declarations before rules.
func chainOf(line string) string {
	if name, ok := strings.CutPrefix(line, ":"); ok {
		return ":" + strings.Fields(name)[0]
	}
	return "~" + strings.Fields(line)[1]
}

// wantEnd compares all rules after the end of nametap with the firewall's rules without it.
func wantEnd(t *testing.T, got, want string) {
	t.Helper()
	wantRules(t, "after nametap has stopped", others(got), others(want))
	for line := range strings.Lines(got) {
		if strings.Contains(line, "NAMETAP") {
			t.Errorf("after nametap has stopped the rules have %q:\n%s", line, got)
		}
	}
}

// wantRules compares rules.
func wantRules(t *testing.T, when, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s the rules are\n%s\nwant\n%s", when, got, want)
	}
}

// before is a service that looks up a name after the firewall has started and before nametap does.
const before = `[Unit]
Wants=network.target
After=network.target netfilter-persistent.service
Before=nametap.service
[Service]
Type=oneshot
ExecStart=sh -c 'iptables-save >/var/tmp/before.rules; getent ahostsv4 www.example.org >/var/tmp/before.addresses'
[Install]
WantedBy=multi-user.target
`

// TestSavedRules saves all rules while the agent runs, in the way of netfilter-persistent, and boots. The firewall restores
// them. DNS works before nametap starts, with it, and if it is not started. Nothing of nametap's is left after a stop. V8.
func TestSavedRules(t *testing.T) {
	m := lab.Boot(t, lab.Packages("iptables-persistent"))
	m.Write("/etc/iptables/rules.v4", persistent("10.9.0.0/24"))
	m.Write("/etc/iptables/rules.v6", persistent("fd09::/64"))
	m.Run("sh", "-euc", "netfilter-persistent reload && systemctl enable netfilter-persistent")
	alone := all(m)
	m.Install()
	m.Start()
	m.Run("netfilter-persistent", "save")
	m.AwaitMesh()
	m.Write("/etc/systemd/system/before.service", before)
	m.Run("systemctl", "daemon-reload")
	m.Run("systemctl", "enable", "before.service")

	m.Reboot()
	if got := m.Read("/var/tmp/before.addresses"); !strings.HasPrefix(got, lab.NamedIP+" ") {
		t.Errorf("before nametap starts, a name has %q", got)
	}
	if got := m.Read("/var/tmp/before.rules"); !strings.Contains(got, "-j NAMETAP_OUTPUT") {
		t.Errorf("before nametap starts, the rules are:\n%s", got)
	}
	m.AwaitMesh()
	wantNames(t, m, map[string]string{"other.example.org": lab.NamedIP})
	wantRules(t, "after the boot", others(all(m)), others(alone))
	m.Systemctl("stop")
	wantEnd(t, all(m), alone)

	m.Systemctl("disable")
	m.Reboot()
	for _, name := range []string{lab.Mesh, "third.example.org"} {
		wait.Until(t, name+" has the address of the nameserver without nametap", func() bool { return m.Lookup(name) == lab.NamedIP })
	}
}
