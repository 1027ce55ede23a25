package iptables_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// finding returns the finding of Check about one thing.
func finding(t *testing.T, c *iptables.Capture, what string) iptables.Finding {
	t.Helper()
	for _, f := range c.Check(t.Context()) {
		if f.What == what {
			return f
		}
	}
	return iptables.Finding{}
}

// K11: the tool itself looks for each rule, and for none if there are no rules.
func TestCheckRules(t *testing.T) {
	t.Parallel()
	labs(t, all(), func(l *lab) {
		t := l.t
		what := "installed rules for " + l.family.String()
		c := l.capture()
		if f := finding(t, c, what); f.What != "" {
			t.Errorf("without rules: %+v", f)
		}
		apply(t, c)
		before := l.saves()
		if f := finding(t, c, what); !f.OK || !strings.Contains(f.Detail, "are in the kernel") {
			t.Errorf("with rules: %+v", f)
		}
		if f := finding(t, c, "tools for "+l.family.String()); !f.OK || !strings.Contains(f.Detail, "-"+string(l.backend)+" is version 1.") {
			t.Errorf("version: %+v", f)
		}
		if after := l.saves(); after != before {
			t.Errorf("check changed something:\n%s", after)
		}
		l.sh("%s%s -w 5 -t nat -D NAMETAP_OUTPUT 1", l.pick("iptables-", "ip6tables-"), l.backend)
		if f := finding(t, c, what); f.OK || !strings.Contains(f.Detail, "are missing: nat: -A NAMETAP_OUTPUT") || !strings.Contains(f.Advice, "capture apply") {
			t.Errorf("without one: %+v", f)
		}
	})
}

// K11: the tool that looks for single rules fails, is missing, or is too old. The rest of
// the check does not need it.
func TestCheckRulesTool(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		script, want string
		needed       bool
	}{
		"fails":   {"exit 4", "is not known: could not get iptables version: exit status 4", false},
		"missing": {"", "is not known: exec:", false},
		"too old": {"echo iptables v1.4.21", "is version 1.4.21", true},
	} {
		t.Run(name, func(t *testing.T) {
			alone(t, func(l *lab) {
				t := l.t
				scripts := map[string]string{}
				for _, tool := range []string{"iptables-nft-save", "iptables-nft-restore"} {
					path, err := exec.LookPath(tool)
					if err != nil {
						t.Fatal(err)
					}
					scripts[tool] = "exec " + path + ` "$@"`
				}
				if test.script != "" {
					scripts["iptables-nft"] = test.script
				}
				l.tools(scripts)
				c := l.apply(func(c *iptables.Config) { c.Backend, c.Only = iptables.NFT, family.IPv4 })
				f := finding(t, c, "tools for IPv4")
				if f.OK || f.Needed != test.needed || !strings.Contains(f.Detail, test.want) || !strings.Contains(f.Advice, "1.6.2 or later") {
					t.Errorf("%+v, want %q", f, test.want)
				}
				if f := finding(t, c, "nft rules for IPv4"); !f.OK {
					t.Errorf("%+v", f)
				}
			})
		})
	}
}
