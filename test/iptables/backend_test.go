package iptables_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// holders returns the tools that print rules of nametap.
func (l *lab) holders() string {
	l.t.Helper()
	var names []string
	for part := range strings.SplitSeq(l.saves(), "== ") {
		if strings.Contains(part, "NAMETAP_OUTPUT") {
			name, _, _ := strings.Cut(part, "\n")
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

const (
	inNFT    = "iptables-nft ip6tables-nft"
	inLegacy = "iptables-legacy ip6tables-legacy"
)

// K4: the rules move to the backend that is wanted. Looking at the other one makes no table there.
func TestOneBackend(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		for _, test := range []struct {
			backend iptables.Backend
			want    string
		}{{iptables.Auto, inNFT}, {iptables.Legacy, inLegacy}, {iptables.Auto, inLegacy}, {iptables.NFT, inNFT}} {
			l.apply(func(c *iptables.Config) { c.Backend = test.backend })
			if got := l.holders(); got != test.want {
				t.Fatalf("with backend %s: in %s, want %s", test.backend, got, test.want)
			}
			if tables := l.sh("cat /proc/net/ip_tables_names"); test.want == inNFT && test.backend == iptables.Auto && tables != "" {
				t.Errorf("looking made legacy tables: %q", tables)
			}
		}
	})
}

// K4: both backends hold rules of nametap, as after a change of the tools' default backend.
func TestRemoveBothBackends(t *testing.T) {
	t.Parallel()
	rules, err := iptables.Build(iptables.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	alone(t, func(l *lab) {
		for _, tool := range []string{"iptables-nft-restore", "iptables-legacy-restore"} {
			l.ns.Pipe(rules.Text(family.IPv4), tool, "--noflush", "-w", "5")
		}
		c := l.capture(auto)
		status, err := c.Status(t.Context())
		if err != nil || !status.Families[0].OtherBackend {
			t.Errorf("status %+v, %v", status, err)
		}
		remove(t, c)
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
	})
}

// tools replaces tools by scripts for the Captures of the lab, until restore is called or the test ends.
func (l *lab) tools(scripts map[string]string) (restore func()) {
	l.t.Helper()
	for name, script := range scripts {
		l.script(name, script)
	}
	return func() {
		l.t.Helper()
		for name := range scripts {
			l.script(name, "exec "+tool(l.t, name)+` "$@"`)
		}
	}
}

// script writes a script in place of a tool. One that runs already is not changed.
func (l *lab) script(name, text string) {
	l.t.Helper()
	process.WriteScript(l.t, filepath.Join(l.dir, name), "#!/bin/sh\n"+text)
}

const noIPv6 = `echo "ip6tables-restore: can't initialize ip6tables table: Address family not supported by protocol" >&2; exit 3`

// K4, K13: a kernel without IPv6 at first. That is logged once, and Keep captures IPv6 later.
func TestFamilyUnavailable(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		tool := "ip6tables-" + string(backend)
		working := l.tools(map[string]string{tool + "-save": noIPv6, tool + "-restore": noIPv6})
		c := l.capture(quick)
		apply(t, c)
		apply(t, c)
		if n := l.log.Count("DNS over one family is not captured"); n != 1 {
			t.Errorf("said %d times, want once:\n%s", n, l.log)
		}
		if got := l.sh("iptables-%s-save", backend); !strings.Contains(got, "REDIRECT") {
			t.Errorf("IPv4:\n%s", got)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Families[0].State != iptables.InPlace || status.Families[1].State != iptables.Unavailable ||
			c.Levels()[family.IPv6] != iptables.LevelUnavailable {
			t.Errorf("status %+v, %v", status, err)
		}
		l.keep(c)
		working()
		wait.Until(t, "IPv6 is captured", func() bool { return c.Levels()[family.IPv6] == iptables.LevelComplete })
		l.complete(c)
		if n := c.Stats().Failures; n != 0 {
			t.Errorf("%d failures", n)
		}
	})
}

// K5, K13: without support for zones, or for comments, table nat alone has rules.
func TestWithoutExtensions(t *testing.T) {
	t.Parallel()
	for _, missing := range []string{"CT", "comment"} {
		t.Run(missing, func(t *testing.T) {
			labs(t, diagonal(), func(l *lab) {
				t := l.t
				libs := t.TempDir()
				l.sh("cp -rs $(dirname $(ls /usr/lib*/xtables/libxt_CT.so /usr/lib/*/xtables/libxt_CT.so 2>/dev/null | head -1))/. %[1]s; rm %[1]s/libxt_%[2]s.so", libs, missing)
				for _, family := range []string{"iptables", "ip6tables"} {
					for _, suffix := range []string{"", "-save", "-restore"} {
						name := fmt.Sprintf("%s-%s%s", family, l.backend, suffix)
						l.script(name, fmt.Sprintf(`XTABLES_LIBDIR=%s exec %s "$@"`, libs, tool(t, name)))
					}
				}
				l.agent()
				c := l.apply()
				l.want("AU")
				if n := l.log.Count("the capture rules leave out"); n == 0 {
					t.Errorf("the log does not say what is left out:\n%s", l.log)
				}
				status, err := c.Status(t.Context())
				if err != nil || status.Families[0].State != iptables.InPlace || len(status.Families[0].Without) == 0 {
					t.Errorf("status %+v, %v", status, err)
				}
				if status, err := l.capture().Status(t.Context()); err != nil ||
					status.Families[0].State != iptables.InPlace {
					t.Errorf("status of another process %+v, %v", status, err)
				}
				if said := failed(t, c); !strings.Contains(said, "(xt_"+missing+")") {
					t.Errorf("check does not name %s: %s", missing, said)
				}
				remove(t, c)
				l.want("U")
			})
		})
	}
}
