package vm

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

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

// others returns the rules and chains among all that are not nametap's. Built-in chains count only if they have a rule or
// a policy of their own.
func others(all string) string {
	return tables(all, func(line string) bool {
		builtin := strings.HasPrefix(line, ":") && strings.Contains(line, " ACCEPT")
		return !strings.Contains(line, "NAMETAP") && !builtin && line != "COMMIT\n"
	})
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
	alone := m.Net.Rules()
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
	wantRules(t, "after the boot", others(m.Net.Rules()), others(alone))
	m.Systemctl("stop")
	wantEnd(t, m.Net.Rules(), alone)

	m.Systemctl("disable")
	m.Reboot()
	for _, name := range []string{lab.Mesh, "third.example.org"} {
		wait.Until(t, name+" has the address of the nameserver without nametap", func() bool { return m.Lookup(name) == lab.NamedIP })
	}
}
