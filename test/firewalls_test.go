package test

import (
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/istiocni"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A ruleset is what another program of a host has in the kernel.
type ruleset struct {
	name string
	// script makes the rules, in testdata/firewalls, after firewallTools.
	script string
	// tunnel is an interface behind which the nameservers are, "" if they are behind eth0; own and servers
	// are its addresses and those of the nameservers, first over IPv4.
	tunnel       string
	own, servers [2]string
	// port is the port of these nameservers, 0 for 53.
	port uint16
	// local says that the nameservers are on this host.
	local bool
	// legacy says that the rules are in iptables-legacy.
	legacy bool
	// passes lists over what queries of clients pass through: "UDP4 TCP4 UDP6 TCP6".
	passes string
	// unnamed says that resolv.conf names no IPv6 nameserver.
	unnamed bool
	// ambient says that the host is a pod of Istio's ambient mode, where ztunnel answers without nametap.
	ambient bool
}

// firewallTools are the functions that scripts of rulesets use.
const firewallTools = `
iptables() { command iptables$BACKEND -w "$@"; }
ip6tables() { command ip6tables$BACKEND -w "$@"; }
both() { iptables "$@"; ip6tables "$@"; }
restore() { command iptables$BACKEND-restore -w -n <$1.v4; command ip6tables$BACKEND-restore -w -n <$1.v6; }
`

// A lookup is what a client gets.
type lookup string

// The results of a lookup.
const (
	lookedUp       lookup = "ok"
	fromNameserver lookup = "nameserver" // a mesh name as the nameserver has it
	noDNS          lookup = "none"
)

// overs are the ways over which clients query.
var overs = []string{"UDP4", "TCP4", "UDP6", "TCP6"}

// lookups queries a mesh name and another name over all ways, from the sockets of root, and returns the
// results: those of mesh names first.
func (v *vm) lookups(servers [2]string) (mesh, other [4]lookup) {
	var asking sync.WaitGroup
	for i, over := range overs {
		server := servers[i/2]
		asking.Go(func() { mesh[i] = v.lookup(over, server, "web.shop.svc.cluster.local.") })
		asking.Go(func() { other[i] = v.lookup(over, server, "www.example.org.") })
	}
	asking.Wait()
	return mesh, other
}

// lookup queries a name.
func (v *vm) lookup(over, server, name string) (got lookup) {
	got = noDNS
	client := dns.Client{Net: strings.ToLower(over[:3]), Timeout: 3 * time.Second}
	var conn *dns.Conn
	var err error
	v.Run(func() { conn, err = client.Dial(net.JoinHostPort(server, "53")) })
	if err != nil {
		return noDNS
	}
	defer conn.Close()
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(name, dns.TypeA), conn)
	if err != nil || len(reply.Answer) != 1 {
		return noDNS
	}
	a, ok := reply.Answer[0].(*dns.A)
	switch isMesh := strings.HasSuffix(name, ".cluster.local."); {
	case ok && isMesh && a.A.String() == namedIP:
		return fromNameserver
	case ok && (isMesh && a.A.String() == meshIP || !isMesh && a.A.String() == namedIP):
		return lookedUp
	}
	return noDNS
}

// host makes a host with the rules.
func (r ruleset) host(tb testing.TB) (v *vm, servers [2]string) {
	tb.Helper()
	backend, suffix := "auto", ""
	if r.legacy {
		backend, suffix = "legacy", "-legacy"
	}
	v, servers = newVM(tb, backend), [2]string{named, named6}
	if r.servers[0] != "" {
		servers = r.servers
	}
	bits := [2]string{"/32", "/128"}
	at := v.net
	switch {
	case r.local:
		at = v.NS
	case r.tunnel != "":
		netns.Connect(
			netns.End{NS: v.NS, Name: r.tunnel, Addrs: []string{r.own[0] + bits[0], r.own[1] + bits[1]}},
			netns.End{NS: v.net, Name: r.tunnel, Addrs: []string{servers[0] + bits[0], servers[1] + bits[1]}},
		)
		for _, own := range r.own {
			v.net.Exec("ip", "route", "add", own, "dev", r.tunnel)
		}
	}
	if r.local || r.tunnel != "" {
		for i, server := range servers { // addresses come first
			addr := netip.MustParseAddr(server)
			if r.local && !addr.IsLoopback() {
				v.Exec("ip", "address", "add", server+bits[i], "dev", "lo", "nodad")
				wait.Until(tb, "the address is local", func() bool {
					return strings.HasPrefix(v.Exec("ip", "route", "get", server), "local ")
				})
			}
			at.Run(func() {
				fakedns.Start(tb, anyName(namedIP), fakedns.On(netip.AddrPortFrom(addr, max(r.port, 53))))
			})
		}
	}
	if r.ambient {
		v.environment = append(v.environment, "KUBERNETES_SERVICE_HOST=10.96.0.1")
		v.Pipe(istiocni.Ambient(false), "iptables-restore", "--noflush")
		v.Pipe(istiocni.Ambient(true), "ip6tables-restore", "--noflush")
	}
	cmd := exec.Command("sh", "-ec", firewallTools+r.script)
	cmd.Dir, cmd.Env = filepath.Join("testdata", "firewalls"), append(cmd.Environ(), "BACKEND="+suffix)
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	err := v.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		tb.Fatalf("%v\n%s", err, &output)
	}
	v.replace("resolv.conf", "nameserver "+servers[0]+"\nnameserver "+servers[1]+"\n")
	if r.unnamed {
		v.replace("resolv.conf", "nameserver "+servers[0]+"\n")
	}
	return v, servers
}

// K19, K20, V8: beside the rules of other programs, a client gets the answers of the agent, or those of the
// nameserver if redirected packets are dropped. It gets some answer wherever it gets one without nametap.
func TestFirewalls(t *testing.T) {
	t.Parallel()
	for _, r := range rulesets() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			v, servers := r.host(t)
			all := [4]lookup{lookedUp, lookedUp, lookedUp, lookedUp}
			wait.Until(t, "nameservers answer without nametap", func() bool {
				_, before := v.lookups(servers)
				return r.ambient || before == all
			})
			var want [4]lookup
			for i, over := range overs {
				want[i] = lookedUp
				if strings.Contains(r.passes, over) {
					want[i] = fromNameserver
				}
			}
			a := v.capture()
			for i, server := range servers {
				wait.Until(t, "the way to a nameserver is known", func() bool { return i > 0 && r.unnamed || a.probed(server) || a.log.Count("capture is incomplete") > 0 })
			}
			mesh, other := v.lookups(servers)
			for try := 0; mesh != want || other != all; try++ {
				if try > 60 {
					t.Fatalf("mesh names: %v, want %v; other names: %v\n%s\n%s", mesh, want, other, a.log, v.nametap("status", "--status-addr", statusAddr).stdout)
				}
				time.Sleep(250 * time.Millisecond) //nolint:forbidigo // the agent probes twice a second
				mesh, other = v.lookups(servers)
			}
		})
	}
}

// K19: a firewall begins to drop the queries that the agent forwards, and lets them pass again.
func TestBarred(t *testing.T) {
	t.Parallel()
	v := newVM(t, "nft")
	v.capture()
	v.asked(named, meshIP)
	v.Pipe("table inet site {\nchain out {\ntype filter hook output priority 0\nmeta l4proto { tcp, udp } th dport 53 meta skuid 1337 drop\n}\n}\n", "nft", "-f", "-")
	wait.Until(t, "queries pass through", func() bool { return v.lookup("UDP4", named, "www.example.org.") == lookedUp })
	v.asked(named, namedIP)
	if r := v.nametap("status", "--status-addr", statusAddr); !strings.Contains(r.stdout, "queries to "+named+": barred") {
		t.Errorf("%+v", r)
	}
	v.Exec("nft", "delete", "table", "inet", "site")
	v.becomes(named, meshIP)
}

// K19: a firewall that drops the redirected packets unless nametap's rules accept them replaces its rules, several
// times and in steps. Queries that are lost meanwhile do not make others pass through.
func TestFirewallReloads(t *testing.T) {
	t.Parallel()
	v := newVM(t, "nft")
	const text = `*filter
:OUTPUT ACCEPT [0:0]
-A OUTPUT ! -o lo -p udp --dport 15053 -j DROP
-A OUTPUT ! -o lo -p tcp --dport 15053 -j DROP
COMMIT
*nat
COMMIT
`
	reload := func() {
		for _, tool := range []string{"iptables-restore", "ip6tables-restore"} {
			v.Pipe(text, tool, "-w", "5")
		}
	}
	reload()
	a := v.capture()
	v.asked(named, meshIP)
	has := func(table string) func() bool {
		return func() bool {
			return strings.Contains(v.Exec("iptables-save", "-t", table), "-j NAMETAP_OUTPUT") && strings.Contains(v.Exec("ip6tables-save", "-t", table), "-j NAMETAP_OUTPUT")
		}
	}
	const said = "do not reach the agent"
	const pass = 800 * time.Millisecond // in which three probes may fail
	quick := 0
	for range 6 {
		lines, began := a.log.Count(said), time.Now()
		for range 3 {
			reload()
			wait.Until(t, "queries are redirected", has("nat"))
		}
		if time.Since(began) < pass {
			quick++
		}
		wait.Until(t, "table filter has the rules of nametap", has("filter"))
		v.becomes(named, meshIP)
		if a.log.Count(said) == lines {
			return
		}
	}
	if quick == 0 && stoodStill(t) {
		return
	}
	t.Errorf("queries pass through each time:\n%s", a.log)
}

// K19: a firewall drops the packets to loopback of all programs, so the agent cannot find out whether it answers.
// It captures nothing, and says so once.
func TestNoLoopback(t *testing.T) {
	t.Parallel()
	v := newVM(t, "nft")
	v.Exec("iptables", "-A", "OUTPUT", "-o", "lo", "-p", "udp", "-j", "DROP")
	v.Exec("ip6tables", "-A", "OUTPUT", "-o", "lo", "-p", "udp", "-j", "DROP")
	a := v.start("--capture")
	packets := func() bool {
		return strings.Count(v.Exec("iptables", "-vnL", "OUTPUT"), " 0     0 DROP") == 0
	}
	wait.Until(t, "a probe is dropped", packets)
	for range 5 {
		v.Exec("iptables", "-Z", "OUTPUT")
		wait.Until(t, "another one is dropped", packets)
	}
	v.asked(named, namedIP)
	wait.Until(t, "the log says so", func() bool { return a.log.Count("no listener answers") == 1 })
	if n := a.log.Count("level=WARN"); n != 1 && !stoodStill(t) {
		t.Errorf("%d warnings:\n%s", n, a.log)
	}
}

// K19: a firewall begins to drop the packets to the agent, those of its own probes, too, where the kernel would not
// end the capture.
func TestDroppedWithoutLease(t *testing.T) {
	t.Parallel()
	v := newVM(t, "nft")
	v.withoutRecent()
	v.capture()
	v.asked(named, meshIP)
	v.Pipe("table inet site {\nchain out {\ntype filter hook output priority 0\nmeta l4proto { tcp, udp } th dport 15053 drop\n}\n}\n", "nft", "-f", "-")
	for _, server := range []string{named, named6} {
		v.becomes(server, namedIP)
	}
	v.Exec("nft", "delete", "table", "inet", "site")
	v.becomes(named, meshIP)
}

// K19: a firewall drops packets to loopback before table raw, so the lease cannot be renewed. Queries pass through, and
// the status does not say that all is well.
func TestLeaseDropped(t *testing.T) {
	t.Parallel()
	v := newVM(t, "nft")
	v.capture()
	v.asked(named, meshIP)
	v.Pipe("table inet site {\nchain out {\ntype filter hook output priority -400\noif lo udp dport 1-1023 drop\n}\n}\n", "nft", "-f", "-")
	v.becomes(named, namedIP)
	if r := v.nametap("status", "--status-addr", statusAddr); !strings.Contains(r.stdout, "or captures nothing: a firewall drops packets to loopback") {
		t.Errorf("%+v", r)
	}
}

// probed reports whether the agent has logged where the queries of clients to a nameserver go.
func (a *agent) probed(server string) bool {
	for line := range strings.Lines(a.log.String()) {
		if strings.Contains(line, "queries of clients") && strings.Contains(line, "nameserver="+server+"\n") || strings.Contains(line, "nameserver="+server+" ") {
			return true
		}
	}
	return false
}
