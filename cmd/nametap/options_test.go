package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// parsed returns the options of a command line and an environment.
func parsed(t *testing.T, args, environ []string) *options {
	t.Helper()
	o := newOptions(pflag.NewFlagSet("test", pflag.ContinueOnError))
	if err := o.flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	if err := settings.Resolve(o.flags, environ); err != nil {
		t.Fatal(err)
	}
	return o
}

// R7, F4: Istio's DNS_FORWARD_PARALLEL means --upstream-order, whose own name wins.
func TestParallel(t *testing.T) {
	for _, c := range []struct {
		args, environ []string
		want          forward.Order
	}{
		{nil, nil, forward.OrderStrict},
		{nil, []string{"DNS_FORWARD_PARALLEL=true"}, forward.OrderFastest},
		{nil, []string{`PROXY_CONFIG={"proxyMetadata": {"DNS_FORWARD_PARALLEL": "true"}}`}, forward.OrderFastest},
		{nil, []string{"DNS_FORWARD_PARALLEL=false"}, forward.OrderStrict},
		{nil, []string{"DNS_FORWARD_PARALLEL=true", "NAMETAP_UPSTREAM_ORDER=strict"}, forward.OrderStrict},
		{[]string{"--upstream-order=strict"}, []string{"DNS_FORWARD_PARALLEL=true"}, forward.OrderStrict},
		{[]string{"--upstream-order=fastest"}, nil, forward.OrderFastest},
	} {
		var log testlog.Buffer
		o := parsed(t, c.args, c.environ)
		o.logParallel(log.Logger())
		logged := c.want == forward.OrderFastest && c.args == nil
		if got := o.agent.DNS.Forward.Order; got != c.want || (log.Count("DNS_FORWARD_PARALLEL") == 1) != logged {
			t.Errorf("%v %v: %s, want %s, log:\n%s", c.args, c.environ, got, c.want, &log)
		}
	}
	o := newOptions(pflag.NewFlagSet("test", pflag.ContinueOnError))
	if err := settings.Resolve(o.flags, []string{"DNS_FORWARD_PARALLEL=maybe"}); err == nil || !strings.Contains(err.Error(), "want strict or fastest") {
		t.Error(err)
	}
}

// R7: the values of settings reach the Configs of the packages. 0 is what the user means.
func TestOptionsFillConfigs(t *testing.T) {
	cfg, err := parsed(t, []string{
		"--cache-size=0", "--serve-stale=0", "--drain=0s", "--before-sync=hold", "--upstream=192.0.2.1,corp.example=192.0.2.2",
		"--upstream=CORP.example=192.0.2.3", "--domain=ns1.svc.mesh.example", "--instance-ip=192.0.2.9", "--pod-name=web-0", "--bypass=a,b",
	}, []string{"POD_NAMESPACE=ns1"}).config()
	if err != nil {
		t.Fatal(err)
	}
	dns, node := cfg.DNS, cfg.XDS.Node
	if dns.Forward.CacheSize >= 0 || dns.Forward.ServeStale >= 0 || cfg.Drain != 0 || dns.BeforeSync != dnsproxy.BeforeSyncHold || dns.Namespace != "ns1" || dns.ID != "web-0" {
		t.Errorf("%+v", dns)
	}
	server := func(last byte) upstream.Spec {
		return upstream.Spec{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, last}), 53)}
	}
	routes := []forward.Route{{Suffix: "corp.example", Servers: []upstream.Spec{server(2), server(3)}}}
	exported := cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })
	if diff := cmp.Diff(routes, dns.Forward.Routes, exported) + cmp.Diff([]upstream.Spec{server(1)}, dns.Forward.Upstreams, exported); diff != "" {
		t.Errorf("nameservers (-want +got):\n%s", diff)
	}
	if node.Domain != "ns1.svc.mesh.example" || node.PodName != "web-0" || node.IPs[0].String() != "192.0.2.9" {
		t.Errorf("%+v", node)
	}
}

// The help of every command names values on purpose only: pflag takes a word in backquotes
// for the name of the value.
func TestHelp(t *testing.T) {
	var check func(command *cobra.Command)
	check = func(command *cobra.Command) {
		command.Flags().VisitAll(func(flag *pflag.Flag) {
			name, _ := pflag.UnquoteUsage(flag)
			if quotes := strings.Count(flag.Usage, "`"); strings.Contains(name, " ") || quotes != 0 && quotes != 2 {
				t.Errorf("%s: the value of --%s is called %q: %s", command.CommandPath(), flag.Name, name, flag.Usage)
			}
		})
		for _, sub := range command.Commands() {
			check(sub)
		}
	}
	check(newRootCommand())
}
