package test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// TestStatusInPod checks that `nametap status` and `nametap capture status` say what is captured in
// a container that has neither capabilities nor the tools of iptables.
func TestStatusInPod(t *testing.T) { // I0, K11
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	v.start()
	v.environment = append(v.environment, "PATH=/nonexistent")
	says := func(code int, parts ...string) {
		t.Helper()
		wait.Until(t, fmt.Sprintf("both say %q", parts), func() bool { // what the agent has read is kept for a second
			status, rules := v.nametap("status", "--status-addr", statusAddr), v.nametap(v.args("status")...)
			missing := func(part string) bool {
				return !strings.Contains(status.stdout, part) || !strings.Contains(rules.stdout, part)
			}
			named := code == 0 || strings.Contains(rules.stderr, "CAP_NET_ADMIN")
			return status.code == 0 && rules.code == code && named && !slices.ContainsFunc(parts, missing)
		})
	}
	installed := func(args ...string) {
		t.Helper()
		path := v.environment
		v.environment = v.environment[:len(path)-1]
		if r := v.root(args...); r.code != 0 {
			t.Errorf("%+v", r)
		}
		v.environment = path
	}
	says(1, "IPv4 not redirected: no program listens for a test query to 127.15.0.53:53", "IPv6 ")
	installed(v.args("apply")...)
	says(0, "IPv4 redirected: an agent answers a test query to 127.15.0.53:53")
	v.Exec("ip", "-6", "route", "add", "default", "dev", "eth0") // as in a pod with IPv6
	says(0, "IPv6 redirected: an agent answers a test query to [100::35]:53")
	var status struct {
		Capture    *struct{}
		Redirected []probe.Result
	}
	r := v.nametap("status", "--status-addr", statusAddr, "--output", "json")
	if err := json.Unmarshal([]byte(r.stdout), &status); err != nil || status.Capture != nil || len(status.Redirected) != 2 || status.Redirected[1].State != probe.Agent {
		t.Errorf("%v, %+v of %s", err, status, r.stdout)
	}
	installed(v.args("remove")...)
	says(1, "IPv4 not redirected", "IPv6 not redirected: no server answers a test query to [100::35]:53")
	v.Run(func() { fakedns.Start(t, anyName(namedIP), fakedns.On(netip.MustParseAddrPort("127.15.0.53:53"))) })
	says(1, "IPv4 not redirected: another server answers a test query")
}

// TestQueryToTestAddress checks that the agent does not forward a query to the address of test queries,
// from where it would come back.
func TestQueryToTestAddress(t *testing.T) { // F6, F14
	t.Parallel()
	v := newVM(t, "nft")
	v.Exec("ip", "-6", "route", "add", "default", "via", named6)
	v.capture("--upstream-timeout", "10s")
	for i, f := range []family.Family{family.IPv4, family.IPv6} {
		before := v.metric("istio_agent_dns_requests_total")
		name := []string{"www4.example.org", "www6.example.org"}[i]
		source := []string{self, self6}[i]
		v.digs(namedIP, "-b", source, "@"+iptables.TestAddr(f).String(), name)
		if n := v.metric("istio_agent_dns_requests_total") - before; n > 3 { // dig repeats a query after 5 s
			t.Errorf("%s: the agent has received %v queries", f, n)
		}
	}
}
