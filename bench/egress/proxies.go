package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/bench/lab"
)

// A proxy is a compared way from the clients to the server. pid is 0 without a proxy.
type proxy struct {
	name string
	pid  int
	// addrs are the addresses to which clients connect, by the port of the server.
	addrs map[int]string
}

// A stage has the namespaces and the processes.
type stage struct{ *lab.Lab }

// newStage makes the namespaces, and starts the server.
func newStage(ctx context.Context) (*stage, error) {
	dir, err := os.MkdirTemp("", "egress")
	if err != nil {
		return nil, err
	}
	s := &stage{&lab.Lab{Dir: dir, Binaries: dir}}
	if err := os.Chmod(dir, 0o755); err != nil { // the agent has another user
		return s, err
	}
	own, err := os.Executable()
	if err != nil {
		return s, err
	}
	server, err := s.Start(ctx, lab.Command{Name: "server", Argv: []string{"unshare", "--net", own, "-role", "server"}})
	if err != nil {
		return s, err
	}
	if err := server.Await(ctx, lab.StartLimit, func(context.Context) error { return apart(server.Pid) }); err != nil {
		return s, err
	}
	inServer := "nsenter --net --target " + strconv.Itoa(server.Pid) + " "
	for _, line := range []string{
		"ip link set lo up",
		"ip link add eth0 type veth peer name eth0 netns " + strconv.Itoa(server.Pid),
		"ip address add " + clientIP + "/24 dev eth0", "ip link set eth0 up", "ip route add default via " + serverIP,
		inServer + "ip link set lo up",
		inServer + "ip address add " + serverIP + "/24 dev eth0",
		inServer + "ip link set eth0 up",
		"sysctl -qw net.ipv4.ip_local_port_range=1024\t65000",
		// Ended connections keep no port. Otherwise the search for a free one would be most of what is measured.
		"sysctl -qw net.ipv4.tcp_max_tw_buckets=0",
		inServer + "sysctl -qw net.ipv4.tcp_max_tw_buckets=0",
	} {
		if text, err := lab.Output(ctx, strings.Split(line, " ")...); err != nil {
			return s, fmt.Errorf("%w: %s", err, text)
		}
	}
	return s, server.Await(ctx, lab.StartLimit, accepts(fmt.Sprintf("%s:%d", serverIP, echoPort)))
}

// apart returns an error while a process is in the network namespace of this one.
func apart(pid int) error {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return err
	}
	other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err == nil && own == other {
		err = errors.New("it is in the same network namespace")
	}
	return err
}

// accepts returns a function that returns an error unless a process accepts connections at an address.
func accepts(addr string) func(context.Context) error {
	return func(ctx context.Context) error {
		var dialer net.Dialer
		conn, err := dialer.DialContext(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}

// start starts a proxy, and returns when it accepts connections. addrs are by the port of the server.
func (s *stage) start(ctx context.Context, name string, addrs map[int]string, argv ...string) (*proxy, error) {
	p, err := s.Start(ctx, lab.Command{Name: name, Argv: argv})
	if err != nil {
		return nil, err
	}
	return &proxy{name: name, pid: p.Pid, addrs: addrs}, p.Await(ctx, lab.StartLimit, accepts(addrs[echoPort]))
}

// proxies starts all proxies. The first one is none; redirected are those that clients also reach behind rules like
// nametap's.
func (s *stage) proxies(ctx context.Context, binary string) (all, redirected []*proxy, err error) {
	direct := &proxy{name: "direct", addrs: map[int]string{}}
	for _, port := range []int{echoPort, sourcePort, helloPort} {
		direct.addrs[port] = fmt.Sprintf("%s:%d", serverIP, port)
	}
	nametap, err := s.nametap(ctx, binary)
	if err != nil {
		return nil, nil, err
	}
	all = append(all, direct)
	for i, start := range []func(context.Context) (*proxy, error){s.haproxy, s.relay} {
		p, err := start(ctx)
		if err != nil {
			return nil, nil, err
		}
		behind, err := redirect(ctx, p, fmt.Sprintf("240.1.0.%d", i+1))
		if err != nil {
			return nil, nil, err
		}
		all, redirected = append(all, p), append(redirected, behind)
	}
	return append(all, nametap), redirected, nil
}

// redirect adds rules that redirect the address ip to a proxy, as nametap's rules do for VIPs. It returns the proxy
// as clients reach it at that address.
func redirect(ctx context.Context, p *proxy, ip string) (*proxy, error) {
	r := &proxy{name: p.name + ", redirected", pid: p.pid, addrs: map[int]string{}}
	for port, addr := range p.addrs {
		_, to, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		_, err = lab.Output(ctx, "iptables", "-t", "nat", "-A", "OUTPUT", "-d", ip, "-p", "tcp", "--dport", strconv.Itoa(port), "-j", "REDIRECT", "--to-ports", to)
		if err != nil {
			return nil, err
		}
		r.addrs[port] = fmt.Sprintf("%s:%d", ip, port)
	}
	return r, nil
}

// haproxy starts HAProxy in TCP mode, with splice.
func (s *stage) haproxy(ctx context.Context) (*proxy, error) {
	text := "global\n maxconn 6000\n log stderr local0\ndefaults\n mode tcp\n option splice-auto\n timeout connect 5s\n timeout client 1h\n timeout server 1h\n"
	addrs := map[int]string{}
	for i, port := range []int{echoPort, sourcePort} {
		addrs[port] = fmt.Sprintf("127.0.0.1:%d", haproxyPort+i)
		text += fmt.Sprintf("listen l%d\n bind %s\n server s %s:%d\n", port, addrs[port], serverIP, port)
	}
	path, err := s.Write("haproxy.cfg", []byte(text))
	if err != nil {
		return nil, err
	}
	return s.start(ctx, "HAProxy", addrs, "haproxy", "-db", "-f", path)
}

// entries are the hosts, as nametap-discovery reads them.
const entries = `apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: db, namespace: shop}
spec: {hosts: [` + exactHost + `], resolution: DNS}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: apps, namespace: shop}
spec: {hosts: ["` + wildcard + `"], resolution: DYNAMIC_DNS}
`

// agentUser is the user and group of the agent, whose packets the agent's rules do not redirect.
const agentUser = "1337"

// nametap starts a control plane and the agent, and asks the agent for the VIPs.
func (s *stage) nametap(ctx context.Context, binary string) (*proxy, error) {
	config := s.Path("config")
	if err := os.Mkdir(config, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(config+"/hosts.yaml", []byte(entries), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(s.Path("resolv.conf"), []byte("nameserver "+serverIP+"\n"), 0o644); err != nil { // the agent has another user
		return nil, err
	}
	control, err := s.Build(ctx, "..", "cmd/nametap-discovery")
	if err == nil && binary == "" {
		binary, err = s.Build(ctx, "..", "cmd/nametap")
	}
	if err != nil {
		return nil, err
	}
	const xds = "127.0.0.1:18010"
	if _, err := s.Start(ctx, lab.Command{Name: "discovery", Argv: []string{
		control, "--config-dir", config, "--http-addr", "127.0.0.1:18080", "--grpc-addr", xds,
	}}); err != nil {
		return nil, err
	}
	agent, err := s.Start(ctx, lab.Command{Name: "nametap", Argv: []string{
		"setpriv", "--reuid", agentUser, "--regid", agentUser, "--clear-groups", "--inh-caps", "+net_admin", "--ambient-caps", "+net_admin",
		binary, "agent", "--capture", "--egress", "--egress-addr", "localhost:" + egressPort, "--xds-addr", xds, "--xds-plaintext",
		"--resolv-conf", s.Path("resolv.conf"), "--state-dir", "", "--namespace", "shop", "--capture-resolved=false",
	}})
	if err != nil {
		return nil, err
	}
	p := &proxy{name: "nametap", pid: agent.Pid, addrs: map[int]string{}}
	for host, ports := range map[string][]int{exactHost: {echoPort, sourcePort}, belowHost: {helloPort}} {
		var vip netip.Addr
		if err := agent.Await(ctx, lab.StartLimit, func(ctx context.Context) (err error) {
			vip, err = vipOf(ctx, host)
			return err
		}); err != nil {
			return nil, err
		}
		for _, port := range ports {
			p.addrs[port] = fmt.Sprintf("%s:%d", vip, port)
		}
	}
	return p, agent.Await(ctx, lab.StartLimit, accepts(p.addrs[echoPort]))
}

// vipOf returns the VIP that the agent answers for a host. The capture rules redirect its query to the agent.
func vipOf(ctx context.Context, host string) (netip.Addr, error) {
	client := dns.Client{Timeout: time.Second}
	reply, _, err := client.ExchangeContext(ctx, new(dns.Msg).SetQuestion(host+".", dns.TypeA), serverIP+":53")
	if err != nil {
		return netip.Addr{}, err
	}
	if len(reply.Answer) == 1 {
		if a, ok := reply.Answer[0].(*dns.A); ok && a.A.To4()[0] == 240 {
			vip, _ := netip.AddrFromSlice(a.A.To4())
			return vip, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s has no VIP", host)
}
