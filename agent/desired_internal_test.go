package agent

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// K6, K9, K17: what is kept for each switch, each nameservers of resolv.conf, each family that
// the agent does not listen on, and each broken way.
func TestDesired(t *testing.T) {
	t.Parallel()
	silent := errors.New("a listener does not answer")
	v4, v6 := family.IPv4, family.IPv6
	without6 := iptables.Config{Only: v4}
	servers := []netip.Addr{netip.MustParseAddr("192.0.2.53")}
	loopback, nameserver := netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("192.0.2.53/32")
	out := func(families ...family.Family) map[family.Family]error {
		without := map[family.Family]error{}
		for _, f := range families {
			without[f] = silent
		}
		return without
	}
	on := func(config iptables.Config) CaptureConfig {
		return CaptureConfig{On: true, Because: "of the test", Config: config}
	}
	anything := iptables.Config{}
	enforced, err := guard.Parse("policy.yaml", []byte("mode: enforce"))
	if err != nil {
		t.Fatal(err)
	}
	guarded := iptables.Config{Guard: &iptables.Guard{}, VIPs: []netip.Prefix{}}
	guardOnly := iptables.Config{Guard: &iptables.Guard{}, VIPs: []netip.Prefix{}, GuardOnly: true, Only: v4}
	resolvConf := CaptureConfig{On: true, Servers: ResolvConfServers}
	for name, test := range map[string]struct {
		in   inputs
		want iptables.Config
		err  error
	}{
		"on":                               {in: inputs{CaptureConfig: on(anything)}},
		"off":                              {in: inputs{unserved: out(v4, v6)}},
		"off without nameservers":          {in: inputs{CaptureConfig: CaptureConfig{Servers: ResolvConfServers}}},
		"nameservers":                      {in: inputs{CaptureConfig: resolvConf, servers: servers}, want: iptables.Config{Servers: servers}},
		"no nameservers":                   {in: inputs{CaptureConfig: resolvConf}, err: errNoServers},
		"nameservers do not matter":        {in: inputs{CaptureConfig: on(anything), servers: servers}},
		"IPv6 does not answer":             {in: inputs{CaptureConfig: on(anything), unserved: out(v6)}, want: iptables.Config{Only: v4}},
		"IPv4 does not answer":             {in: inputs{CaptureConfig: on(anything), unserved: out(v4)}, want: iptables.Config{Only: v6}},
		"none answers":                     {in: inputs{CaptureConfig: on(anything), unserved: out(v4, v6)}, err: silent},
		"IPv6 is not wanted, IPv4 answers": {in: inputs{CaptureConfig: on(without6)}, want: without6},
		"IPv6 is not wanted, nor there":    {in: inputs{CaptureConfig: on(without6), unserved: out(v6)}, want: without6},
		"IPv6 is not wanted, IPv4 silent":  {in: inputs{CaptureConfig: on(without6), unserved: out(v4)}, err: silent},
		"the rules stay without an agent":  {in: inputs{CaptureConfig: on(iptables.Config{FailClosed: true})}, want: iptables.Config{FailClosed: true}},
		"the way to a nameserver is broken": {
			in: inputs{CaptureConfig: on(iptables.Config{ExcludeCIDRs: []netip.Prefix{loopback}}),
				passing: map[family.Family][]netip.Prefix{v4: {nameserver}}},
			want: iptables.Config{ExcludeCIDRs: []netip.Prefix{loopback, nameserver}},
		},
		// G9, G10: with a guard, nothing passes that the agent does not see.
		"a guard, the way to a nameserver is broken": {
			in: inputs{CaptureConfig: on(anything), policy: enforced, passing: map[family.Family][]netip.Prefix{v4: {nameserver}}}, want: guarded,
		},
		"a guard, none answers":   {in: inputs{CaptureConfig: on(anything), policy: enforced, unserved: out(v4, v6)}, want: guardOnly},
		"a guard, no nameservers": {in: inputs{CaptureConfig: resolvConf, policy: enforced}, want: guarded},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := test.in.desired()
			if !errors.Is(err, test.err) {
				t.Fatalf("error %v, want %v", err, test.err)
			}
			want := iptables.Desired{On: test.in.On, Because: test.in.Because, Config: test.want}
			want.Config.Lease = !test.in.Config.FailClosed
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); err == nil && diff != "" {
				t.Errorf("desired (-want +got):\n%s", diff)
			}
		})
	}
}
