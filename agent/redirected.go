package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// A Redirection says whether queries over one family are redirected to the agent, according to a test query.
// A test query needs no capability, so it works in the agent's container of a pod.
type Redirection struct {
	Family family.Family `json:"family"`
	State  RedirectState `json:"state"`
	// Detail is the result of the test query.
	Detail string `json:"detail"`
}

// RedirectState is the state of a Redirection.
type RedirectState string

// The values of RedirectState.
const (
	Redirected      RedirectState = "redirected"
	NotRedirected   RedirectState = "not redirected"
	RedirectUnknown RedirectState = "unknown"
)

// testTimeout is how long the answer to a test query may take.
const testTimeout = 500 * time.Millisecond

// Redirections sends a test query over each of the families to [iptables.TestAddr]. The rules of
// nametap redirect the query to the agent's listener, which answers with its version (RFC 4892).
func Redirections(ctx context.Context, families []family.Family) []Redirection {
	found := make([]Redirection, len(families))
	var testing sync.WaitGroup
	for i, f := range families {
		testing.Go(func() {
			found[i] = Redirection{Family: f}
			found[i].State, found[i].Detail = redirection(ctx, netip.AddrPortFrom(iptables.TestAddr(f), 53))
		})
	}
	testing.Wait()
	return found
}

// redirection sends a test query to the address in the parameter to. It returns what the result says about redirection,
// and a text about the result.
func redirection(ctx context.Context, to netip.AddrPort) (state RedirectState, detail string) {
	q := question{description: fmt.Sprintf("a test query to %s", to), network: "udp", to: to.String(), name: askVersion, limit: testTimeout}
	if to.Addr().Is6() {
		q.hops = 1 // if the query is not redirected, the first router discards it
	}
	text, err := ask(ctx, q)
	switch {
	case err == nil && isNametap(text):
		return Redirected, "an agent answers " + q.description
	case err == nil:
		return NotRedirected, "another server answers " + q.description
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH) && !unsent(err):
		return NotRedirected, "no server answers " + q.description
	case unsent(err):
		return RedirectUnknown, fmt.Sprintf("cannot send %v", err)
	case isTimeout(err):
		return NotRedirected, fmt.Sprintf("%s is not answered within %v", q.description, testTimeout)
	}
	return RedirectUnknown, err.Error()
}

// A Listener is an address to which the rules of this host redirect queries.
type Listener struct {
	dnsproxy.Addr
	Family family.Family `json:"family"`
	State  ListenerState `json:"state"`
	// Error says why no agent answers.
	Error string `json:"error,omitempty"`
}

// ListenerState is the state of a Listener.
type ListenerState string

// The values of ListenerState.
const (
	ListenerAnswers ListenerState = "an agent answers"
	ListenerOther   ListenerState = "another program answers"
	ListenerSilent  ListenerState = "no answer" // a program may listen, but it does not answer
	ListenerClosed  ListenerState = "no listener"
	ListenerAbsent  ListenerState = "no address" // the host lacks the family
)

// Listeners sends queries, over UDP and TCP, to the listeners to which the rules of a family redirect. port is the port
// of these listeners. It returns the state of each listener.
func Listeners(ctx context.Context, f family.Family, port uint16) []Listener {
	found := make([]Listener, 0, 2)
	for _, network := range []string{"udp", "tcp"} {
		found = append(found, Listener{Family: f, Addr: dnsproxy.Addr{Network: network, Address: netip.AddrPortFrom(f.Loopback(), port).String()}})
	}
	var probing sync.WaitGroup
	for i := range found {
		probing.Go(func() { found[i].probe(ctx) })
	}
	probing.Wait()
	return found
}

// probe sets the state of a listener.
func (l *Listener) probe(ctx context.Context) {
	text, err := ask(ctx, listenerQuestion(l.Addr, askVersion))
	switch {
	case err == nil && isNametap(text):
		l.State = ListenerAnswers
		return
	case err == nil:
		l.State, l.Error = ListenerOther, errOtherServer.Error()
		return
	case errors.Is(err, syscall.ECONNREFUSED):
		l.State = ListenerClosed
	case noRoute(err):
		l.State = ListenerAbsent
	default:
		l.State = ListenerSilent
	}
	l.Error = err.Error()
	if op := new(net.OpError); errors.As(err, &op) { // the text of the whole error would repeat the address
		l.Error = withCause(op.Err).Error()
	}
}
