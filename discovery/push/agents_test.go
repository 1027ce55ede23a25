package push

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// want fails the test unless the client is shown in a state.
func (c *fakeClient) want(state AgentState, behind bool) {
	c.tb.Helper()
	if a := c.shown(); a.State != state || a.Behind != behind || a.Current != (a.Digest == a.ServedDigest) {
		c.tb.Errorf("the client is shown as %+v, want %s, behind %t", a, state, behind)
	}
}

// edit changes the Service that clients see.
func (c *fakeClient) edit(i int) hosts.Change {
	return hosts.Change{Updated: []object.Object{service("shop", "web", fmt.Sprintf("10.0.0.%d", i))}}
}

// D66: a client is behind when it has not answered a push, or was not sent one, for 10 s, or has rejected one.
func TestAgentStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, mode := range []string{modeNamed, modeWhole} {
			s := newService()
			c := &fakeClient{}
			s.updateAll(t, c.edit(1))
			c = join(t, s, "shop", mode)
			c.want(StateUpdating, false)
			c.ack()
			c.want(StateCurrent, false)
			pass(time.Hour)
			c.want(StateCurrent, false)

			s.updateAll(t, c.edit(2))
			c.want(StateUpdating, false)
			pass(behindAfter - time.Second)
			s.updateAll(t, c.edit(3)) // which does not restart its wait
			c.want(StateUpdating, false)
			pass(time.Second)
			c.want(StateUnanswered, true)
			c.ack()
			c.want(StateUpdating, false)
			c.ack()
			c.want(StateCurrent, false)

			s.updateAll(t, c.edit(4))
			pass(time.Millisecond)
			c.nack()
			c.want(StateRejected, true)
			pass(time.Hour)
			s.updateAll(t, c.edit(5))
			c.want(StateRejected, true)
			pass(time.Millisecond)
			c.ack()
			c.want(StateCurrent, false)
			if a := c.shown(); a.Nack == nil || a.Nack.Reason != "no" || a.Nack.Seconds != 3600.001 || *a.LastAckSeconds != 0 || *a.LastPushSeconds != 0.001 {
				t.Errorf("the client is shown as %+v", a)
			}

			// A change that no round pushes.
			_, woken := s.tables.update([]hosts.Change{c.edit(6)}, func(hosts.Update, hosts.Counts) {})
			c.want(StateUpdating, false)
			pass(behindAfter)
			c.want(StateUnsent, true)
			if len(woken) != 1 || woken[0].push() != nil {
				t.Errorf("%d sessions are woken", len(woken))
			}
			c.want(StateUpdating, false)
			c.end()
		}
	})
}

// D66: a client that has not requested any table is shown as such.
func TestAgentsWithoutTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService()
		silent := &session{service: s, variant: variantSotw, connected: s.tables.elapsed()}
		s.streams.Store(silent, nil)
		c := join(t, s, "shop", modeWhole)
		c.ack()
		pass(behindAfter)
		all := slices.Collect(s.Agents(""))
		if len(all) != 2 || all[0].State != StateWaiting || !all[0].Behind || all[0].ID != "" || all[1].Name != "web-0" {
			t.Errorf("shown are %+v", all)
		}
		c.end()
	})
}

// D66: texts of a client are bounded. The program of Istio's agent is not the Envoy behind it.
func TestAgentTexts(t *testing.T) {
	s := newService()
	c := join(t, s, "shop", modeNamed)
	c.answer(strings.Repeat("long", 1000))
	if a := c.shown(); len(a.Nack.Reason) != maxForeign+len("...") {
		t.Errorf("a reason of %d bytes", len(a.Nack.Reason))
	}
	named := func(name, version string) *corev3.Node {
		return &corev3.Node{UserAgentName: name, UserAgentVersionType: &corev3.Node_UserAgentVersion{UserAgentVersion: version}}
	}
	for want, node := range map[string]*corev3.Node{
		"":                      {},
		"nametap v0.1.0":        named("nametap", "v0.1.0"),
		"nametap":               {UserAgentName: "nametap"},
		strings.Repeat("x", 64): named(strings.Repeat("x", 1000), ""),
	} {
		if got := software(node); got != want {
			t.Errorf("%v: %q, want %q", node, got, want)
		}
	}
}

// D66: what is shown of clients waits for no change and no client, and a change waits for no reader.
func TestAgentsWhileTablesChange(t *testing.T) {
	s := newService()
	clients := joinAll(t, s, 300)
	i := 0
	for a := range s.Agents("") {
		s.updateAll(t, clients[0].edit(i%200))
		for _, c := range clients {
			if err := c.handle(&Request{typeURL: TypeURL, nonce: c.nonce}); err != nil {
				t.Fatal(err)
			}
		}
		if i++; !a.Current {
			t.Fatalf("%+v", a)
		}
		clients[len(clients)-1].end() // some end meanwhile
		clients = clients[:max(len(clients)-1, 1)]
	}
	if i < 150 {
		t.Errorf("%d clients were shown", i)
	}
}
