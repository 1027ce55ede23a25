package test

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// A VM also has the two nameservers over IPv6, all behind eth0.
const (
	named6 = "fd00::53"
	other6 = "fd00::54"

	self  = "10.0.0.1"
	self6 = "fd00::1"

	mesh    = "web.shop.svc.cluster.local"
	meshIP  = "10.1.0.1"   // from the agent
	namedIP = "192.0.2.53" // from the nameserver in resolv.conf, for every name
	otherIP = "192.0.2.54"
)

// The capabilities that iptables-legacy needs besides CAP_NET_ADMIN if the user is not
// root: it opens a raw socket, and only root can read the names of its tables.
const (
	capDACReadSearch = 2
	capNetRaw        = 13
)

// A vm is a host with its nameservers on another machine, over both families.
type vm struct {
	*host
	backend        string    // of its rules
	net            *netns.NS // the other machine
	named6, other6 *fakedns.Server
}

// newVM makes a vm. Its agents listen for both families, use the backend, and forward with a timeout of 2 s, so they
// settle in 3 s.
func newVM(tb testing.TB, backend string) *vm {
	tb.Helper()
	netns.Need(tb, "ip", "iptables-nft", "iptables-legacy", "dig")
	v := &vm{host: newBareHost(tb), backend: backend, net: netns.New(tb)}
	netns.Connect(
		netns.End{NS: v.NS, Name: "eth0", Addrs: []string{self + "/24", self6 + "/64"}},
		netns.End{NS: v.net, Name: "eth0", Addrs: []string{named + "/24", other + "/24", named6 + "/64", other6 + "/64"}},
	)
	v.named, v.other = nameserver(tb, v.net, named, namedIP), nameserver(tb, v.net, other, otherIP)
	v.named6, v.other6 = nameserver(tb, v.net, named6, namedIP), nameserver(tb, v.net, other6, otherIP)
	for _, tool := range []string{"iptables", "ip6tables"} {
		if backend != "auto" {
			tool += "-" + backend
		}
		for _, table := range []string{"filter", "nat", "raw"} { // rules of another program; legacy also keeps every table that was ever used
			v.Exec(tool, "-w", "-t", table, "-A", "OUTPUT", "-p", "udp", "-m", "udp", "--dport", "5353", "-j", "RETURN")
		}
	}
	v.signal = syscall.SIGKILL // faster than the removal of rules after each test
	v.flags = []string{"--dns-addr", "localhost:15053", "--upstream-timeout", "2s"}
	if backend == "legacy" {
		v.capabilities = append(v.capabilities, capNetRaw, capDACReadSearch)
	}
	return v
}

// vms runs a subtest for each backend of iptables, at the same time.
func vms(t *testing.T, test func(v *vm)) {
	t.Helper()
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			test(newVM(t, backend))
		})
	}
}

// captured reports whether the kernel has rules of nametap, in any backend and family.
func (v *vm) captured() bool {
	v.tb.Helper()
	return strings.Contains(v.Rules(), "-j NAMETAP_OUTPUT")
}

// capture starts an agent with --capture, and returns when queries are captured over each family that has rules, or when
// the agent knows that they do not reach it.
func (v *vm) capture(flags ...string) *agent {
	v.tb.Helper()
	a := v.start(append([]string{"--capture"}, flags...)...)
	wait.Until(v.tb, "DNS is captured", func() bool {
		select {
		case <-a.ended:
			v.tb.Fatal("the agent ended")
		default:
		}
		return a.log.Count("do not reach the agent") > 0 || v.metric("nametap_capture_on") == 1 && v.leases()
	})
	return a
}

// leases reports whether the rules of each family have a lease, as far as they need one.
func (v *vm) leases() bool {
	v.tb.Helper()
	for _, f := range family.All() {
		tool := map[family.Family]string{family.IPv4: "iptables-", family.IPv6: "ip6tables-"}[f]
		for _, backend := range []string{"nft", "legacy"} {
			rules := v.Exec("sh", "-c", tool+backend+"-save || true") // it may find rules that only nft can read
			if !strings.Contains(rules, "-m recent") {
				continue
			}
			alive, err := false, error(nil)
			v.Run(func() { alive, err = iptables.Leased(f) })
			if !alive && err == nil { // an error is that of a firewall
				return false
			}
		}
	}
	return true
}

// meshConfig returns a mesh config that switches capture on or off.
func meshConfig(on bool) string {
	return fmt.Sprintf("defaultConfig:\n  proxyMetadata:\n    ISTIO_META_DNS_CAPTURE: %q\n", strconv.FormatBool(on))
}

// breakTool makes a tool fail with a transient error for all following commands of the
// host, until repair is called.
func (v *vm) breakTool(name string) (repair func()) {
	v.tb.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		v.tb.Fatal(err)
	}
	v.script(name, "#!/bin/sh\nif [ -e "+v.write("broken", "")+" ]; then echo 'Resource temporarily unavailable.' >&2; exit 4; fi\nexec "+path+" \"$@\"\n")
	v.environment = append(v.environment, "PATH="+v.dir+":"+os.Getenv("PATH"))
	return func() {
		if err := os.Remove(v.dir + "/broken"); err != nil {
			v.tb.Fatal(err)
		}
	}
}
