package test

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestUnreachableClients sends queries from addresses that no machine has, as any user may (ipv6(7), IPV6_FREEBIND), to
// an agent on loopback, and to one on all addresses. Others are answered meanwhile.
func TestUnreachableClients(t *testing.T) { // R23
	t.Parallel()
	const queries = 3000
	v := newVM(t, "auto")
	packet, err := new(dns.Msg).SetQuestion(mesh+".", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	freeBind := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) (err error) {
		_ = conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_FREEBIND, 1) })
		return err
	}}
	for _, test := range []struct {
		address, server string
		dropped         float64 // at least
	}{
		{"localhost:15053", "[" + named6 + "]:53", queries},
		{"localhost:15053", "[::1]:15053", queries},
		{":5301", "[" + self6 + "]:5301", 0},
	} {
		a := v.capture("--dns-addr", test.address)
		server := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(test.server))
		for i := range queries {
			v.Run(func() {
				conn, err := freeBind.ListenPacket(t.Context(), "udp6", fmt.Sprintf("[fd00::a:%x]:0", i))
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				if _, err := conn.WriteTo(packet, server); err != nil {
					t.Error(err)
				}
			})
			if i%1000 == 0 {
				v.asked(named6, meshIP)
			}
		}
		v.asked(named6, meshIP)
		wait.Until(t, "they are dropped", func() bool { return v.metric("nametap_dns_dropped_total") >= test.dropped })
		if n := v.metric("istio_agent_dns_requests_total"); test.dropped == 0 && n < queries {
			t.Errorf("%v of %d queries were read", n, queries)
		}
		a.end(syscall.SIGKILL)
	}
}
