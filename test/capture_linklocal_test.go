package test

import (
	"strings"
	"testing"
)

const linkLocal = "fe80::53"

// TestCaptureLinkLocal uses a router's link-local address as the nameserver in resolv.conf.
// Queries of clients to it pass through, and the agent forwards to it.
func TestCaptureLinkLocal(t *testing.T) { // K14
	t.Parallel()
	const onEth0 = linkLocal + "%eth0"
	v := newVM(t, "nft")
	v.net.Exec("ip", "address", "add", linkLocal+"/64", "dev", "eth0", "nodad")
	router := nameserver(t, v.net, onEth0, otherIP)
	conf := "nameserver " + onEth0 + "\n"
	v.resolvConf = v.write("resolv.conf", conf)
	v.capture()
	for _, over := range []string{"+notcp", "+tcp"} {
		v.digs(otherIP, over, "@"+onEth0, "www.example.org")
		v.digs(meshIP, over, "@"+named6, mesh)
	}
	if got := v.client(conf, "getent", "ahosts", "www.example.org"); !strings.HasPrefix(got, otherIP+" ") {
		t.Errorf("getaddrinfo: %s", got)
	}
	before := len(router.Queries())
	v.digs(otherIP, "-p", "15053", "@127.0.0.1", "forwarded.example.org")
	if n := len(router.Queries()) - before; n < 1 { // on a busy machine, the agent repeats a query that is late
		t.Error("the nameserver has received no query of the agent")
	}
}
