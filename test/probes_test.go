package test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestSupervisedUnprobed checks that an agent whose listeners cannot be probed does not count as hung: the kernel refuses
// packets from processes of this host to its UDP port, as when conntrack is full. Captured queries still arrive.
func TestSupervisedUnprobed(t *testing.T) { // K15
	t.Parallel()
	v := newVM(t, "nft")
	a := v.capture("--supervise")
	change := func(how string) {
		for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
			v.Exec(tool, "-t", "mangle", how, "OUTPUT", "-p", "udp", "--dport", "15053", "-j", "DROP")
		}
	}
	change("-A")
	wait.Until(t, "more probes are refused than a hung agent gets", func() bool {
		refused := 0
		for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
			for line := range strings.Lines(v.Exec(tool, "-t", "mangle", "-nvxL", "OUTPUT")) {
				if fields := strings.Fields(line); len(fields) > 2 && fields[2] == "DROP" {
					packets, _ := strconv.Atoi(fields[0])
					refused += packets
				}
			}
		}
		return refused >= 2*5
	})
	change("-D")
	v.asked(named, meshIP)
	if n := a.log.Count("the agent hangs"); n > 0 || v.metric("nametap_restarts_total") > 0 {
		t.Errorf("the agent was killed:\n%s", a.log)
	}
}
