package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// firewall returns what a firewall's service restores when it is started or reloaded. It
// has a rule of its own for DNS, and none of nametap's.
func firewall(port string) string {
	return strings.ReplaceAll(`*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:SITE - [0:0]
-A OUTPUT -p tcp -m tcp --dport PORT -j SITE
-A SITE -p tcp -m tcp --dport PORT -j REDIRECT --to-ports 3128
COMMIT
*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A OUTPUT -p udp -m udp --dport PORT -j RETURN
COMMIT
`, "PORT", port)
}

// rules returns nametap's rules of both families and both backends.
func (v *vm) rules() string {
	v.tb.Helper()
	var rules []string
	for line := range strings.Lines(v.Rules()) {
		if strings.Contains(line, "NAMETAP_OUTPUT") {
			rules = append(rules, line)
		}
	}
	return strings.Join(rules, "")
}

// V8: a firewall that replaces all rules, as nftables.service, netfilter-persistent and
// iptables.service do, removes nametap's for at most 5 s and keeps its own.
func TestFirewallReplacesRules(t *testing.T) {
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		tools := []string{"iptables-" + v.backend, "ip6tables-" + v.backend}
		restore := func(port string) {
			t.Helper()
			for _, tool := range tools {
				v.Pipe(firewall(port), tool+"-restore", "-w", "5")
			}
		}
		restore("8001") // the firewall starts before the agent
		a := v.capture()
		rules := v.rules()
		v.asked(named, meshIP)
		for _, port := range []string{"8002", "8003"} {
			if v.backend == "nft" {
				v.Exec("nft", "flush", "ruleset") // nftables.service does this first
			}
			restore(port)
			// By a repair, or with the next rules if a probe has missed them before.
			wait.Until(t, "the rules are back", func() bool { return v.rules() == rules })
			v.becomes(named, meshIP) // the agent renews the lease of the new rules
			v.becomes(named6, meshIP)
			for _, tool := range tools {
				saved := v.Exec(tool + "-save")
				for line := range strings.Lines(firewall(port)) {
					if strings.HasPrefix(line, "-A") && !strings.Contains(saved, line) {
						t.Errorf("%s: after the repair the firewall has no rule %q:\n%s", tool, line, saved)
					}
				}
			}
		}
		a.end(terminate)
		after := v.Rules()
		restore("8003")
		if want := v.Rules(); after != want {
			t.Errorf("after the agent's end:\n%s\nwant what the firewall restores:\n%s", after, want)
		}
	})
}
