package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// TestQueryCaptured checks that `nametap query --captured` goes the way of a client's query, from the socket of
// another user than root and the agent, and says what has answered.
func TestQueryCaptured(t *testing.T) { // R19
	t.Parallel()
	v := newVM(t, "nft")
	args := []string{"query", "--captured", "--resolv-conf", v.resolvConf, "--dns-addr", "localhost:15053", "--status-addr", statusAddr, mesh, "A"}
	query := func(want ...string) {
		t.Helper()
		r := v.root(args...)
		for _, part := range want {
			if r.code != 0 || !strings.Contains(r.stdout, part) {
				t.Errorf("%q is not in %+v", part, r)
			}
		}
	}
	a := v.start()
	query(namedIP, "the query of uid 65534 to "+named+":53 was answered by another server, not an agent")
	v.named.Handle(fakedns.Answer(mesh+". 60 IN A "+namedIP, "id.server. 0 CH TXT other")) // others may never answer that
	if r := v.root(append(args, "--output", "json")...); r.code != 0 || strings.Contains(r.stdout, "other\"") {
		t.Errorf("a server that is no agent was asked who it is: %+v", r)
	}
	a.end(terminate)

	// root's own queries pass through.
	v.capture("--capture-exclude-uid", "0")
	v.digs(namedIP, "@"+named, mesh)
	query(meshIP, "the query of uid 65534 to "+named+":53 was answered by this agent")
	if r := v.nametap(args...); r.code != 1 || !strings.Contains(r.stderr, "queries of this user (uid 1337, gid 1337) are not captured") {
		t.Errorf("as the agent's user: %+v", r)
	}
}
