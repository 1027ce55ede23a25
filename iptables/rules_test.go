package iptables_test

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

var update = flag.Bool("update", false, "write the golden files anew")

func configs() map[string]iptables.Config {
	cs := make(map[string]iptables.Config)
	add := func(name string, change func(*iptables.Config)) {
		cfg := iptables.DefaultConfig()
		change(&cfg)
		cs[name] = cfg
	}
	add("default", func(*iptables.Config) {})
	add("lease", func(c *iptables.Config) { c.Lease = true })
	add("bare", func(c *iptables.Config) {
		c.NATOnly, c.AgentGIDs, c.Only = true, nil, family.IPv4
	})
	add("servers", func(c *iptables.Config) {
		c.Servers = []netip.Addr{netip.MustParseAddr("127.0.0.53"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fe80::53%eth0"), netip.MustParseAddr("fd00::53")}
	})
	add("everything", func(c *iptables.Config) {
		c.Port = 5300
		c.AgentUIDs, c.AgentGIDs = []uint32{1337, 0}, []uint32{1337, 4294967294}
		c.Servers = []netip.Addr{netip.MustParseAddr("10.0.0.2")}
		c.ExcludeUIDs, c.ExcludeGIDs = []uint32{101}, []uint32{102}
		c.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("192.168.1.7/16"), netip.MustParsePrefix("2001:DB8::/32"), netip.MustParsePrefix("0.0.0.0/0")}
		c.ExcludeInterfaces = []string{"wg0", "tun+"}
		c.VirtualInterfaces = []string{"docker0", "k6t-eth0"}
	})
	add("pod", func(c *iptables.Config) { c.Pod, c.ExcludeUIDs = true, []uint32{101} })
	add("egress", func(c *iptables.Config) {
		c.EgressPort, c.VIPs = 15054, []netip.Prefix{netip.MustParsePrefix("240.240.0.0/16"), netip.MustParsePrefix("2001:2::/48")}
		c.ExcludeUIDs, c.VirtualInterfaces = []uint32{101}, []string{"docker0"}
	})
	guarded := func(c *iptables.Config) {
		c.EgressPort, c.VIPs = 15054, []netip.Prefix{netip.MustParsePrefix("240.64.0.0/10"), netip.MustParsePrefix("2001:2::/48")}
		c.Guard = &iptables.Guard{Direct: []iptables.Direct{
			{Prefix: netip.MustParsePrefix("10.96.0.0/12")}, {Prefix: netip.MustParsePrefix("10.0.5.7/32"), Port: 4317},
			{Prefix: netip.MustParsePrefix("fd00::/64")}, {Prefix: netip.MustParsePrefix("fd01::1/128"), Port: 53},
		}}
	}
	add("guard", guarded)
	add("guard-audit", func(c *iptables.Config) { guarded(c); c.Guard.Audit, c.Lease = true, true })
	add("guard-bare", func(c *iptables.Config) {
		guarded(c)
		c.NATOnly, c.Only, c.VirtualInterfaces = true, family.IPv4, []string{"docker0"}
	})
	return cs
}

// K11: the text equals the committed one.
func TestText(t *testing.T) {
	t.Parallel()
	for name, cfg := range configs() {
		t.Run(name, func(t *testing.T) {
			rules, err := iptables.Build(cfg)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range []family.Family{family.IPv4, family.IPv6} {
				golden := filepath.Join("testdata", name+"."+strings.ToLower(f.String()))
				if *update {
					if err := os.WriteFile(golden, []byte(rules.Text(f)), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), rules.Text(f)); diff != "" {
					t.Errorf("%s (-want +got):\n%s", golden, diff)
				}
			}
		})
	}
}

func TestConfigErrors(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*iptables.Config){
		"capture port 0":                    func(c *iptables.Config) { c.Port = 0 },
		"needs the uid or gid of the agent": func(c *iptables.Config) { c.AgentUIDs, c.AgentGIDs = nil, nil },
		`capture server "::ffff:10.0.0.1"`:  func(c *iptables.Config) { c.Servers = []netip.Addr{netip.MustParseAddr("::ffff:10.0.0.1")} },
		`capture server "0.0.0.0"`:          func(c *iptables.Config) { c.Servers = []netip.Addr{netip.IPv4Unspecified()} },
		`capture server "fe80::1%a b"`:      func(c *iptables.Config) { c.Servers = []netip.Addr{netip.MustParseAddr("fe80::1%a b")} },
		`excluded CIDR "invalid Prefix"`:    func(c *iptables.Config) { c.ExcludeCIDRs = make([]netip.Prefix, 1) },
		`capture server "::1:2"`:            func(c *iptables.Config) { c.Servers = []netip.Addr{netip.MustParseAddr("::1:2")} },
		`excluded CIDR "::2:3/112"`:         func(c *iptables.Config) { c.ExcludeCIDRs = []netip.Prefix{netip.MustParsePrefix("::2:3/112")} },
		`interface "+"`:                     func(c *iptables.Config) { c.ExcludeInterfaces = []string{"+"} },
		`interface ""`:                      func(c *iptables.Config) { c.ExcludeInterfaces = []string{""} },
		`interface "-j"`:                    func(c *iptables.Config) { c.VirtualInterfaces = []string{"-j"} },
		`interface "a\nCOMMIT"`:             func(c *iptables.Config) { c.VirtualInterfaces = []string{"a\nCOMMIT"} },
		`interface "a-name-of-16-by"`:       func(c *iptables.Config) { c.VirtualInterfaces = []string{"a-name-of-16-byt"} },
		`iptables backend "nftables"`:       func(c *iptables.Config) { c.Backend = "nftables" },
		"port 15053 for VIPs":               func(c *iptables.Config) { c.EgressPort = 15053 },
		`range of VIPs "0.0.0.0/0"`:         func(c *iptables.Config) { c.VIPs = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")} },
		`network "::1:2/128"`: func(c *iptables.Config) {
			c.Guard = &iptables.Guard{Direct: []iptables.Direct{{Prefix: netip.MustParsePrefix("::1:2/128")}}}
		},
		"reconcile interval -1s": func(c *iptables.Config) { c.Interval = -time.Second },
	} {
		cfg := iptables.DefaultConfig()
		change(&cfg)
		want = strings.TrimSuffix(want, `y"`)
		if _, err := iptables.New(cfg, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// K4, K17: a missing IPv6 is a failure if it is the only family.
func TestNeeds(t *testing.T) {
	t.Parallel()
	for only, want := range map[family.Family]bool{0: false, family.IPv4: false, family.IPv6: true} {
		cfg := iptables.DefaultConfig()
		cfg.Only = only
		if got := cfg.Needs(family.IPv6); got != want || !cfg.Needs(family.IPv4) {
			t.Errorf("only %v: needs IPv6: %v, want %v", only, got, want)
		}
	}
}

// K6, K17: a listener serves the rules of its family on loopback and on all addresses, and the
// rules for virtual interfaces on all addresses only.
func TestServes(t *testing.T) {
	t.Parallel()
	cfg := iptables.DefaultConfig()
	virtual := cfg
	virtual.VirtualInterfaces = []string{"docker0"}
	for address, want := range map[string]struct{ plain, virtual bool }{
		"127.0.0.1:15053": {true, false},
		"[::1]:15053":     {true, false},
		"0.0.0.0:15053":   {true, true},
		"[::]:15053":      {true, true},
		"127.0.0.2:15053": {false, false},
		"127.0.0.1:15054": {false, false},
	} {
		listener := netip.MustParseAddrPort(address)
		if cfg.Serves(listener) != want.plain || virtual.Serves(listener) != want.virtual {
			t.Errorf("%s: serves %v, with virtual interfaces %v, want %+v", address, cfg.Serves(listener), virtual.Serves(listener), want)
		}
	}
}
