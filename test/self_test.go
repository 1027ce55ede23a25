package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestAddressBecomesOwn checks that the agent does not query a nameserver while its address
// belongs to this host.
func TestAddressBecomesOwn(t *testing.T) { // F6
	t.Parallel()
	netns.Need(t, "dig")
	h := newBareHost(t)
	h.capabilities = append(h.capabilities, capNetBindService)
	a := h.start("--dns-addr", ":53")
	leftOut := func() bool {
		return strings.Contains(h.Exec("dig", "+tries=1", "@127.0.0.1", "www.example.org"), "no nameserver to ask")
	}
	if leftOut() {
		t.Error("the nameserver is not used at the start")
	}
	for n := range 2 {
		h.Exec("ip", "address", "add", named+"/32", "dev", "lo")
		wait.Until(t, "the nameserver is not used, and the log says so once", func() bool {
			return leftOut() && a.log.Count("a nameserver is left out") == n+1
		})
		h.Exec("ip", "address", "del", named+"/32", "dev", "lo")
		wait.Until(t, "the agent uses the nameserver again", func() bool { return !leftOut() })
	}
}
