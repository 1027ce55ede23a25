package test

import (
	"context"
	"testing"

	"github.com/nametap/nametap/internal/fakexds"
	"github.com/nametap/nametap/internal/netns"
)

// C1: an agent that started before the network was up tells the control plane the
// addresses that the host is given later, of each family, and those that it has after
// an address was removed.
func TestAddressesOfTheMoment(t *testing.T) {
	netns.Need(t, "ip")
	h := newBareHost(t)
	far := netns.New(t)
	a := h.start("--instance-ip", "", "--capture=false")
	h.wantNode(1, "127.0.0.1")

	netns.Connect(
		netns.End{NS: h.NS, Name: "eth0", Addrs: []string{"10.0.0.1/24"}},
		netns.End{NS: far, Name: "eth0", Addrs: []string{"10.0.0.2/24"}},
	)
	h.wantNode(2, "10.0.0.1")
	h.Exec("ip", "address", "add", "fd00::1/64", "dev", "eth0", "nodad")
	h.wantNode(3, "10.0.0.1,fd00::1")
	h.Exec("ip", "address", "del", "10.0.0.1/24", "dev", "eth0")
	h.wantNode(4, "fd00::1")
	if n := a.log.Count("level=WARN"); n != 0 {
		t.Errorf("%d warnings", n)
	}
}

// wantNode waits for a stream of at least this number whose node has the addresses.
func (h *host) wantNode(stream int, addresses string) {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(h.tb.Context(), patience)
	defer cancel()
	_, err := h.xds.Wait(ctx, func(r fakexds.Request) bool {
		return r.Stream >= stream && r.Node().GetMetadata().GetFields()["INSTANCE_IPS"].GetStringValue() == addresses
	})
	if err != nil {
		h.tb.Fatalf("no stream %d or later of a node with %s: %v", stream, addresses, err)
	}
}
