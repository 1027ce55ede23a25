package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/family"
)

const (
	// probeTimeout is how long a listener has to answer a probe.
	probeTimeout = time.Second
	// probeRetry is the time after which an unanswered probe over UDP is sent again.
	probeRetry = probeTimeout / 10
)

// probeAll probes all listeners at the same time. It returns the errors of the calls of the function probe, in the
// order of listeners: nil for a listener that answers.
func probeAll(ctx context.Context, listeners []dnsproxy.Addr, probe func(context.Context, dnsproxy.Addr) error) []error {
	errs := make([]error, len(listeners))
	var probing sync.WaitGroup
	for i, l := range listeners {
		probing.Go(func() { errs[i] = probe(ctx, l) })
	}
	probing.Wait()
	return errs
}

// probeOne returns an error unless a listener answers. It sends a query for id.server (RFC 4892), because the agent
// answers it without a table and without a nameserver.
func probeOne(ctx context.Context, l dnsproxy.Addr) error {
	_, err := ask(ctx, listenerQuestion(l, askID))
	return err
}

// probeAgent returns an error unless an agent of nametap answers. Another program may listen at the address, such as
// Istio's agent, which uses the same port.
func probeAgent(ctx context.Context, l dnsproxy.Addr) error {
	q := listenerQuestion(l, askVersion)
	text, err := ask(ctx, q)
	if err == nil && !isNametap(text) {
		err = fmt.Errorf("%s: %w", q.description, errOtherServer)
	}
	return err
}

// silentListeners returns a text for each listener that does not answer, with the reason.
func silentListeners(ctx context.Context, listeners []dnsproxy.Addr) (texts []string) {
	for _, err := range probeAll(ctx, listeners, probeOne) {
		if err != nil {
			texts = append(texts, err.Error())
		}
	}
	return texts
}

// probeAny returns an error if queries were sent to UDP listeners and no listener has answered.
func probeAny(ctx context.Context, listeners []dnsproxy.Addr) error {
	errs := probeAll(ctx, listeners, probeOne)
	sent := slices.ContainsFunc(errs, func(err error) bool { return !unsent(err) })
	if !sent || slices.Contains(errs, nil) {
		return nil
	}
	return errors.Join(errs...)
}

// The names of questions.
const (
	askID      = "id.server."
	askVersion = "version.server."
)

// A question is a query to a server about the server itself, in class CHAOS (RFC 4892). An agent needs neither a
// table nor a nameserver to answer it.
type question struct {
	description string // the description of the probe in errors
	network, to string // the server
	name        string
	hops        int           // TTL or hop limit of the packets; 0 means the system's default
	limit       time.Duration // how long the answer may take; 0 means probeTimeout
}

// listenerQuestion returns the question with this name for a listener.
func listenerQuestion(l dnsproxy.Addr, name string) question {
	return question{description: "probing the listener " + l.String(), network: l.Network, to: reachable(l.Address), name: name}
}

// errOtherServer is the error for an answer that is not the agent's.
var errOtherServer = errors.New("another DNS server answers")

// ask sends a question. Over UDP it sends the question again every probeRetry until there is an answer, because the
// kernel drops a question while the buffer of the listener is full. ask returns the text of the answer, or "" if the
// answer is not exactly one TXT record. [unsent], [isTimeout] and [noRoute] distinguish the errors.
func ask(ctx context.Context, q question) (text string, err error) {
	defer func() {
		if err = withCause(err); err != nil {
			err = fmt.Errorf("%s: %w", q.description, err)
		}
	}()
	limit := cmp.Or(q.limit, probeTimeout)
	dialer := net.Dialer{Timeout: limit}
	if q.hops != 0 {
		dialer.Control = setHops(q.hops)
	}
	began := time.Now()
	conn, err := dialer.DialContext(ctx, q.network, q.to)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	client := dns.Client{Net: q.network, Timeout: limit}
	if q.network == "udp" {
		client.Timeout = probeRetry
	}
	query := new(dns.Msg).SetQuestion(q.name, dns.TypeTXT)
	query.Question[0].Qclass = dns.ClassCHAOS
	for {
		reply, _, err := client.ExchangeWithConnContext(ctx, query, &dns.Conn{Conn: conn})
		switch {
		case err == nil:
			return textOf(reply), nil
		case !isTimeout(err) || ctx.Err() != nil || time.Since(began) >= limit:
			return "", err
		}
	}
}

// textOf returns the text of a reply that has exactly one TXT record. For other replies it returns "".
func textOf(reply *dns.Msg) string {
	if len(reply.Answer) != 1 {
		return ""
	}
	if txt, ok := reply.Answer[0].(*dns.TXT); ok {
		return strings.Join(txt.Txt, "")
	}
	return ""
}

// versionPrefix is how the version of every agent begins.
const versionPrefix = "nametap "

// isNametap reports whether a text is the version of an agent.
func isNametap(text string) bool { return strings.HasPrefix(text, versionPrefix) }

// queryHops is the TTL or hop limit of queries that the agent sends to nameservers: the usual default. The agent sets
// it because a sysctl, a route or a router may change the default of this host. If the default were
// [iptables.ProbeHops], the rules would take the agent's queries for probes and redirect them to the agent.
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

// withCause returns err, the error of a probe. If conntrack is full, it adds that as the cause: the kernel then drops
// the first packet of each flow that passes rules of table nat, even if the rules do not redirect the packet.
func withCause(err error) error {
	table := ConntrackEntries()
	if err == nil || len(problems.Conntrack(table)) == 0 {
		return err
	}
	return fmt.Errorf("%w; the kernel drops new flows, because conntrack has %d of at most %d entries: raise net.netfilter.nf_conntrack_max", err, table.Used, table.Limit)
}

// causes returns the causes of failed probes as text. It leaves out the ports of the probes, because these differ
// each time.
func causes(errs []error) string {
	var text strings.Builder
	for _, err := range errs {
		if op := new(net.OpError); errors.As(err, &op) {
			err = op.Err
		}
		text.WriteString(err.Error() + "\n")
	}
	return text.String()
}

// noRoute reports whether an error means that the host has no address of a family or no route.
func noRoute(err error) bool {
	return slices.ContainsFunc([]error{syscall.EADDRNOTAVAIL, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EAFNOSUPPORT},
		func(absent error) bool { return errors.Is(err, absent) })
}

// unsent reports whether a probe failed before its query was sent. That is so if the kernel dropped the packet (for
// example because conntrack is full), if the process has no descriptor left, or if the host lacks the address. Such
// an error says nothing about a UDP listener.
func unsent(err error) bool {
	op := new(net.OpError)
	return errors.As(err, &op) && op.Op != "read"
}

// isTimeout reports whether a listener has not answered a probe in time. Any other error
// means that the listener cannot be reached.
func isTimeout(err error) bool {
	timeout := net.Error(nil)
	return errors.As(err, &timeout) && timeout.Timeout()
}

// listeningFamilies returns the families that a query path listens on.
func listeningFamilies(proxy *dnsproxy.Server) []family.Family {
	return slices.DeleteFunc(family.All(), func(f family.Family) bool {
		return !slices.ContainsFunc(proxy.Addrs(), func(l dnsproxy.Addr) bool {
			at, err := netip.ParseAddrPort(l.Address)
			return err == nil && family.Of(at.Addr()) == f
		})
	})
}

// udpListeners returns the UDP listeners of a query path.
func udpListeners(proxy *dnsproxy.Server) []dnsproxy.Addr {
	return slices.DeleteFunc(proxy.Addrs(), func(l dnsproxy.Addr) bool { return l.Network != "udp" })
}

// addrPorts returns the addresses of the UDP listeners of a query path.
func addrPorts(proxy *dnsproxy.Server) []netip.AddrPort {
	var all []netip.AddrPort
	for _, l := range udpListeners(proxy) {
		if addr, err := netip.ParseAddrPort(l.Address); err == nil {
			all = append(all, addr)
		}
	}
	return all
}

// reachable returns the address at which to probe a listener on address. A listener on
// all addresses is probed on loopback, which needs no route.
func reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip, parseErr := netip.ParseAddr(host); err == nil && parseErr == nil && ip.IsUnspecified() {
		host = family.Of(ip).Loopback().String()
	}
	return net.JoinHostPort(host, port)
}
