package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/iptables"
)

// A Redirection says whether queries over one family are redirected to the agent now, as a test
// query shows. It needs no capability, so it works in the agent's container of a pod.
type Redirection struct {
	Family iptables.Family `json:"family"`
	State  RedirectState   `json:"state"`
	// Detail is the reason of the state.
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

// OnlyNameserverOf returns the path of a resolv.conf if all of its nameservers are listeners of the
// agent, so that the queries of programs that read it come to the agent without rules. Otherwise it
// returns "".
func OnlyNameserverOf(path string, listeners []netip.AddrPort) string {
	path = cmp.Or(path, resolvconf.DefaultPath)
	file, err := readServers(path)
	if err != nil {
		return ""
	}
	if others, _ := resolvconf.WithoutSelf(file.Servers, listeners, nil); len(others) > 0 {
		return ""
	}
	return path
}

const (
	// testTimeout is how long the answer of a test query may take.
	testTimeout = 500 * time.Millisecond
	// versionPrefix is how the version of every agent begins.
	versionPrefix = "nametap "
)

// Redirections sends a test query for each of the families to [iptables.TestAddr]. The rules of
// nametap redirect it to the agent's listener, which answers it with its version (RFC 4892).
func Redirections(ctx context.Context, families []iptables.Family) []Redirection {
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

// redirection sends a test query to an address.
func redirection(ctx context.Context, to netip.AddrPort) (state RedirectState, detail string) {
	query := chaosQuery("version.server.")
	client := dns.Client{Timeout: testTimeout, Dialer: &net.Dialer{Timeout: testTimeout, Control: firstHop}}
	reply, _, err := client.ExchangeContext(ctx, query, to.String())
	switch {
	case err == nil && isNametap(reply):
		return Redirected, fmt.Sprintf("an agent answers a test query to %s", to)
	case err == nil:
		return NotRedirected, fmt.Sprintf("another server answers a test query to %s", to)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH) && !unsent(err):
		return NotRedirected, fmt.Sprintf("no server answers a test query to %s", to)
	case unsent(err):
		return RedirectUnknown, fmt.Sprintf("a test query cannot be sent: %v", err)
	case isTimeout(err):
		return NotRedirected, fmt.Sprintf("a test query to %s is not answered within %v", to, testTimeout)
	}
	return RedirectUnknown, err.Error()
}

// firstHop makes the first router discard packets of a socket, so that test queries over IPv6 that
// are not redirected leave only the host.
func firstHop(network, address string, conn syscall.RawConn) error {
	if network != "udp6" {
		return nil
	}
	return setHops(1)(network, address, conn)
}

// queryHops is the TTL or hop limit of queries that the agent sends to nameservers: the usual one. With that of
// probes, which a sysctl, a route or a router may make the default, they would come back to the agent.
const queryHops = 64

// setHops returns a control function that gives the packets of a socket a TTL or hop limit.
func setHops(hops int) func(network, address string, conn syscall.RawConn) error {
	return func(network, _ string, conn syscall.RawConn) error {
		level, option := unix.IPPROTO_IP, unix.IP_TTL
		if strings.HasSuffix(network, "6") {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		var err error
		controlErr := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, hops) })
		return errors.Join(controlErr, err)
	}
}

// isNametap reports whether a reply has the version of an agent.
func isNametap(reply *dns.Msg) bool {
	for _, rr := range reply.Answer {
		if txt, ok := rr.(*dns.TXT); ok && strings.HasPrefix(strings.Join(txt.Txt, ""), versionPrefix) {
			return true
		}
	}
	return false
}

// A Listener is an address to which the rules of this host redirect queries.
type Listener struct {
	dnsproxy.Addr
	Family iptables.Family `json:"family"`
	State  ListenerState   `json:"state"`
	// Error says why no agent answers.
	Error string `json:"error,omitempty"`
}

// ListenerState is the state of a Listener.
type ListenerState string

// The values of ListenerState.
const (
	ListenerAnswers ListenerState = "an agent answers"
	ListenerOther   ListenerState = "another program answers"
	ListenerSilent  ListenerState = "no answer" // a program may have the port
	ListenerClosed  ListenerState = "no listener"
	ListenerAbsent  ListenerState = "no address" // the host lacks the family
)

// Listeners queries the addresses to which the rules of a family redirect to a port, over UDP and TCP, and
// says which of them an agent answers. It needs no capability, no table and no nameserver.
func Listeners(ctx context.Context, f iptables.Family, port uint16) []Listener {
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
	reply, err := askServer(ctx, l.Addr, "version.server.")
	switch {
	case err == nil && isNametap(reply):
		l.State = ListenerAnswers
		return
	case err == nil:
		l.State, l.Error = ListenerOther, "another DNS server answers"
		return
	case errors.Is(err, syscall.ECONNREFUSED):
		l.State = ListenerClosed
	case noRoute(err):
		l.State = ListenerAbsent
	default:
		l.State = ListenerSilent
	}
	l.Error = err.Error()
	if op := new(net.OpError); errors.As(err, &op) { // the rest repeats the address
		l.Error = op.Err.Error()
	}
}
