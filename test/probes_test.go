package test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// unprobed makes the kernel refuse packets from processes of this host to the agent's own
// UDP port, as when conntrack is full. Captured queries still arrive. It returns a function
// that counts the refused packets, and a function that ends this.
func (v *vm) unprobed() (refused func() int, end func()) {
	v.tb.Helper()
	rule := []string{"OUTPUT", "-p", "udp", "--dport", "15053", "-j", "DROP"}
	tables := [][]string{{"iptables-nft", "-t", "mangle"}, {"ip6tables-nft", "-t", "mangle"}}
	for _, table := range tables {
		v.Exec(table[0], slices.Concat(table[1:], []string{"-A"}, rule)...)
	}
	refused = func() (n int) {
		for _, table := range tables {
			for line := range strings.Lines(v.Exec(table[0], slices.Concat(table[1:], []string{"-nvxL", "OUTPUT"})...)) {
				if fields := strings.Fields(line); len(fields) > 2 && fields[2] == "DROP" {
					packets, _ := strconv.Atoi(fields[0])
					n += packets
				}
			}
		}
		return n
	}
	return refused, func() {
		for _, table := range tables {
			v.Exec(table[0], slices.Concat(table[1:], []string{"-D"}, rule)...)
		}
	}
}

// TestSupervisedUnprobed checks that an agent whose listeners cannot be probed does not
// count as hung.
func TestSupervisedUnprobed(t *testing.T) { // K15
	t.Parallel()
	v := newVM(t, "nft")
	a := v.capture("--supervise")
	refused, end := v.unprobed()
	wait.Until(t, "more probes are refused than a hung agent gets", func() bool { return refused() >= 2*5 })
	end()
	v.asked(named, meshIP)
	if n := a.log.Count("the agent hangs"); n > 0 || v.metric("nametap_restarts_total") > 0 {
		t.Errorf("the agent was killed:\n%s", a.log)
	}
}
