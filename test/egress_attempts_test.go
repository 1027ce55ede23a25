package test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E10, E17: while no address of a name answers, the attempts to reach them leave half of the descriptors to DNS. A host of
// which one address of many answers is reached meanwhile.
func TestEgressAttempts(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	var addrs []string
	for i := range 20 {
		addr := fmt.Sprintf("10.0.0.%d", 60+i)
		e.net.Exec("ip", "address", "add", addr+"/24", "dev", "eth0")
		addrs = append(addrs, addr)
	}
	e.net.Exec("iptables-nft", "-w", "-A", "INPUT", "-p", "tcp", "--dport", "7", "!", "-d", serverB, "-j", "DROP")
	e.net.Serve(serverB+":7", greeter("two"))
	e.resolve(exactA, addrs...)
	e.resolve(exactB, append(addrs, serverB)...)
	e.descriptors = 2000
	a := e.capture()
	own := a.openFiles()
	for range 180 {
		e.mustDial(vipA, "7")
	}
	peak := uint64(0)
	wait.Until(t, "the first attempts have ended", func() bool {
		peak = max(peak, a.openFiles())
		return e.refusals("connect") > 0
	})
	if got := e.greeting(vipB, "7"); got != "220 two" {
		t.Errorf("the last address: %q", got)
	}
	if peak < own+2*180 || peak > own+uint64(e.descriptors)/2 {
		t.Errorf("%d descriptors are open, %d of them before 180 connections: want some more than two for each, and at most %d", peak, own, e.descriptors/2)
	}

	// The reasons are in one line, and not too many.
	wait.Until(t, "the first attempts were refused", func() bool { return e.metric("nametap_egress_open_connections") == 0 })
	if got := e.greeting(vipB, "9"); !strings.Contains(got, "reset") {
		t.Errorf("a port without a server: %q", got)
	}
	status := e.root("status", "--status-addr", statusAddr).stdout
	for line := range strings.Lines(status) {
		if strings.Contains(line, exactB+":9: dial tcp ") && strings.Count(line, "connection refused") == 8 && strings.Contains(line, ", 13 more\n") {
			return
		}
	}
	t.Errorf("want a line with 8 errors and 13 more in:\n%s", status)
}
