package test

import (
	"bufio"
	"fmt"
	"net"
	"testing"
)

// E15: with --egress-source, connections to different hosts have the same source ports, so they leave ports to
// each other and to other programs.
func TestEgressSourcePorts(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	const source, source6, ports, conns = "10.0.0.201", "fd00::201", 100, 60
	e.Exec("ip", "address", "add", source+"/24", "dev", "eth0")
	e.Exec("ip", "address", "add", source6+"/64", "dev", "eth0", "nodad")
	hosts, sources := map[string][]string{}, map[string]string{} // sources by VIP
	for i, addr := range []string{serverA, serverB, server6A, server6B} {
		host, vip := fmt.Sprintf("host-%d.example.com", i), fmt.Sprintf("240.240.1.%d", i)
		e.resolve(host, addr)
		hosts[host], sources[vip] = []string{vip}, source
		if i >= 2 {
			sources[vip] = source6
		}
		e.net.Serve(net.JoinHostPort(addr, "7"), func(conn *net.TCPConn) {
			_, _ = fmt.Fprintf(conn, "%s\n", conn.RemoteAddr().(*net.TCPAddr).IP)
			_, _ = conn.Read(make([]byte, 1)) // until the client ends
		})
	}
	e.push(hosts)
	e.Exec("sysctl", "-qw", fmt.Sprintf("net.ipv4.ip_local_port_range=40000 %d", 40000+ports-1))
	e.capture("--egress-source", source, "--egress-source", source6)
	for i := range conns {
		for vip, want := range sources {
			line, err := bufio.NewReader(e.mustDial(vip, "7")).ReadString('\n')
			if err != nil || line != want+"\n" {
				t.Fatalf("connection %d to %s: %q, %v, want %q", i, vip, line, err, want)
			}
		}
	}
}
