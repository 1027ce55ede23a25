package iptables_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// K1
func TestCapture(t *testing.T) {
	t.Parallel()
	labs(t, all(), func(l *lab) {
		t := l.t
		l.agent()
		l.want("U")
		c := l.apply()
		l.want("AU")
		remove(t, c)
		l.want("U")
	})
}

// K6
func TestExclusions(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		other := startPeer(t, l.ns)
		other.do("user 2000 3000")
		fromOther := func(way string) {
			t.Helper()
			if got := other.do("ask udp - %s 2o", l.server('2')); got != "2o"+way {
				t.Errorf("uid 2000, gid 3000: %q, want way %q", got, way)
			}
		}
		prefix := netip.MustParsePrefix(l.pick("10.77.0.3/32", "fd77::3/128"))
		c := l.capture()
		with := func(change func(*iptables.Config)) {
			t.Helper()
			replace(t, c, l.config(change))
		}
		apply(t, c)
		fromOther("AU")
		with(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{1999, 2000} })
		fromOther("U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeGIDs = []uint32{3000} })
		fromOther("U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeCIDRs = []netip.Prefix{prefix} })
		l.wantFrom(l.server('3'), "U")
		l.want("AU")
		with(func(c *iptables.Config) { c.ExcludeInterfaces = []string{"eth+"} })
		l.want("U")
		with(func(c *iptables.Config) { c.ExcludeInterfaces = []string{"eth1"} })
		l.want("AU")
		with(func(c *iptables.Config) { c.Servers = []netip.Addr{prefix.Addr()} })
		l.want("U")
		l.wantFrom(l.server('3'), "AU")
		with(func(c *iptables.Config) { c.Servers = []netip.Addr{prefix.Addr(), netip.MustParseAddr("192.0.2.1")} })
		l.wantFrom(l.server('3'), "AU")
		l.want("U")
	})
}

// K8
func TestSocketsInUse(t *testing.T) {
	t.Parallel()
	for name, natOnly := range map[string]bool{"zone": false, "no zone": true} {
		t.Run(name, func(t *testing.T) {
			labs(t, diagonal(), func(l *lab) {
				t := l.t
				l.agent()
				l.addForeign(l.backend) // without any rules there are no entries
				conn := l.socket()
				l.wantOn(conn, "U")
				c := l.apply(func(c *iptables.Config) { c.NATOnly = natOnly })
				l.wantOn(conn, "AU")
				remove(t, c)
				l.wantOn(conn, "U")
				apply(t, c)
				l.wantOn(conn, "AU")
			})
		})
	}
}

// K2, K10: the second time changes nothing, and Apply checks nothing, even if it takes longer than the time between two
// checks.
func TestApplyTwice(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := l.config(func(c *iptables.Config) { c.Interval = time.Nanosecond })
		c := l.with(cfg)
		apply(t, c)
		once := l.saves()
		apply(t, c)
		apply(t, l.with(cfg))
		if twice := l.saves(); twice != once {
			t.Errorf("after the second time:\n%s\nafter the first:\n%s", twice, once)
		}
		if n := l.log.Count("DNS is captured"); n != 1 || c.Stats().Checks > 0 {
			t.Errorf("said %d times that DNS is captured, want once, and %d checks:\n%s", n, c.Stats().Checks, l.log)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Backend != backend {
			t.Fatalf("status %+v, %v", status, err)
		}
		for _, f := range status.Families {
			if f.State != iptables.InPlace || f.OtherBackend {
				t.Errorf("status %+v", f)
			}
		}
	})
}

// K2, K10: iptables-save prints the rules unchanged, with both backends, so that they can be compared as text.
func TestTextIsWhatIsSaved(t *testing.T) {
	t.Parallel()
	golden, err := filepath.Glob("../../iptables/testdata/*.ipv[46]")
	if err != nil || len(golden) == 0 {
		t.Fatal(golden, err)
	}
	backends(t, func(l *lab) {
		for _, name := range golden {
			text, err := os.ReadFile(name)
			if err != nil {
				l.t.Fatal(err)
			}
			tool := "iptables-" + string(l.backend)
			if strings.HasSuffix(name, "6") {
				tool = "ip6tables-" + string(l.backend)
			}
			l.ns.Pipe(string(text), tool+"-restore", "-w", "5") // replaces these tables
			want := rulesByChain(regexp.MustCompile(`(?m)^-I (\S+) \d+`).ReplaceAllString(string(text), "-A $1"))
			if diff := cmp.Diff(want, rulesByChain(l.ns.Exec(tool+"-save"))); diff != "" {
				l.t.Errorf("%s (-text +saved):\n%s", name, diff)
			}
			l.ns.Pipe(emptied, tool+"-restore", "-w", "5")
		}
	})
}

// emptied replaces all tables of nametap by empty ones.
const emptied = "*raw\nCOMMIT\n*nat\nCOMMIT\n*filter\nCOMMIT\n"

// rulesByChain returns the rules of each chain, by the table and the chain.
func rulesByChain(text string) map[string][]string {
	rules, table := map[string][]string{}, ""
	for line := range strings.Lines(text) {
		if line[0] == '*' {
			table = strings.TrimSpace(line)
		}
		if rule, ok := strings.CutPrefix(line, "-A "); ok {
			chain, spec, _ := strings.Cut(rule, " ")
			rules[table+" "+chain] = append(rules[table+" "+chain], strings.TrimRight(spec, " \n"))
		}
	}
	return rules
}

// K9: a query that is in flight when rules are removed gets its reply.
func TestRemoveInFlight(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(func(c *iptables.Config) { c.Settle = time.Minute })
		conn := l.socket()
		l.wantOn(conn, "AU")
		l.askHeld(conn)
		end := l.removing(c)
		wait.Until(t, "the rules are unhooked", func() bool { return l.log.Count("no longer captured") == 1 })
		for range 5 { // in which rules that wait for nothing would be removed
			l.saves()
		}
		if l.holders() == "" {
			t.Error("nothing waits for replies")
		}
		l.wantHeld(conn, "AU")
		end()
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
		l.wantOn(conn, "U")
	})
}
