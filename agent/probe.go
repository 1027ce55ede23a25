package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/iptables"
)

const (
	// probeTimeout is how long a listener has to answer a probe.
	probeTimeout = time.Second
	// probeRetry is the time after which an unanswered probe over UDP is sent again.
	probeRetry = probeTimeout / 10
	// ProgramUser is the user "nobody" and its group, as which AsProgram sends queries, like any program.
	ProgramUser = 65534
)

// A Probe is the result of a query that asks a server about itself.
type Probe struct {
	Network string     `json:"network"`
	To      string     `json:"to"` // the server
	State   ProbeState `json:"state"`
	Error   string     `json:"error,omitempty"` // why there is no answer
	Err     error      `json:"-"`
}

// ProbeState says what the result of a probe shows.
type ProbeState string

// The states of probes.
const (
	ProbeAgent  ProbeState = "an agent answers" // the wanted agent, if the probe is for a certain one
	ProbeOther  ProbeState = "another server answers"
	ProbeSilent ProbeState = "no server answers"
	ProbeClosed ProbeState = "no program listens for"
	ProbeUnsent ProbeState = "this host cannot send" // the kernel drops the query, or the process has no descriptor
	ProbeAbsent ProbeState = "this host has no address for"
)

// Answered reports whether any server has answered.
func (p Probe) Answered() bool { return p.State == ProbeAgent || p.State == ProbeOther }

// Sent reports whether the query was sent. If not, the result says nothing about the server.
func (p Probe) Sent() bool { return p.State != ProbeUnsent && p.State != ProbeAbsent }

// probeAll sends all questions at the same time, and returns the results in the same order. A text that isAgent accepts is
// the wanted agent's; nil accepts all. An agent answers without a table and without a nameserver (RFC 4892).
func probeAll(ctx context.Context, questions []question, isAgent func(text string) bool) []Probe {
	found := make([]Probe, len(questions))
	var probing sync.WaitGroup
	for i, q := range questions {
		probing.Go(func() { found[i] = probe(ctx, q, isAgent) })
	}
	probing.Wait()
	return found
}

// probe sends one question.
func probe(ctx context.Context, q question, isAgent func(text string) bool) Probe {
	found, op := Probe{Network: q.network, To: q.to}, new(net.OpError)
	text, err := ask(ctx, q)
	unsent := errors.As(err, &op) && op.Op != "read"
	switch {
	case err == nil && (isAgent == nil || isAgent(text)):
		found.State = ProbeAgent
		return found
	case err == nil:
		found.State, err = ProbeOther, fmt.Errorf("%s: another DNS server answers", q.description)
	case errors.Is(err, syscall.ECONNREFUSED):
		found.State = ProbeClosed
	case unsent && noRoute(err):
		found.State = ProbeAbsent
	case unsent:
		found.State = ProbeUnsent
	default:
		found.State = ProbeSilent
	}
	found.Err, found.Error = err, err.Error()
	if op.Err != nil { // the whole text has the address
		found.Error = withCause(op.Err).Error()
	}
	return found
}

// silentTexts returns a text for each listener that has not answered, with the reason.
func silentTexts(found []Probe) (texts []string) {
	for _, p := range found {
		if p.Err != nil {
			texts = append(texts, p.Err.Error())
		}
	}
	return texts
}

// Redirections sends a test query over each of the families to [iptables.TestAddr]. The rules of nametap redirect the
// query to the agent's listener. A test query needs no capability, so it works in the agent's container of a pod.
func Redirections(ctx context.Context, families []family.Family) []Probe {
	const testTimeout = 500 * time.Millisecond
	questions := make([]question, 0, len(families))
	for _, f := range families {
		to := netip.AddrPortFrom(iptables.TestAddr(f), 53).String()
		q := question{description: "a test query to " + to, network: "udp", to: to, name: askVersion, limit: testTimeout}
		if f == family.IPv6 {
			q.hops = 1 // if the query is not redirected, the first router discards it
		}
		questions = append(questions, q)
	}
	return probeAll(ctx, questions, isNametap)
}

// Listeners sends queries, over UDP and TCP, to the listeners to which the rules of a family redirect. port is the port
// of these listeners.
func Listeners(ctx context.Context, f family.Family, port uint16) []Probe {
	return probeAll(ctx, listenerQuestions(askVersion, listenersAt(f, port)...), isNametap)
}

// AnswersAt reports whether an agent answers queries over UDP at an address.
func AnswersAt(ctx context.Context, addr string) bool {
	questions := listenerQuestions(askVersion, dnsproxy.Addr{Network: "udp", Address: addr})
	return probe(ctx, questions[0], isNametap).State == ProbeAgent
}

// AsProgram queries a nameserver, over UDP and over TCP, as a program of another user would. The wanted agent is the one
// with these listeners; the error says why none of them answers. AsProgram must run as root to send the queries as
// another user.
func AsProgram(ctx context.Context, server netip.AddrPort, listeners []dnsproxy.Addr) ([]Probe, error) {
	own, err := "", errors.New("it has no DNS listener")
	for _, q := range listenerQuestions(askIdentity, listeners...) {
		if own, err = ask(ctx, q); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	questions := listenerQuestions(askIdentity, dnsproxy.Addr{Network: "udp", Address: server.String()}, dnsproxy.Addr{Network: "tcp", Address: server.String()})
	for i := range questions {
		questions[i].description, questions[i].limit, questions[i].asProgram = "a query of a program", 2*probeTimeout, true
	}
	return probeAll(ctx, questions, func(text string) bool { return text == own }), nil
}

// listenersAt returns the addresses of the listeners to which rules of a family redirect.
func listenersAt(f family.Family, port uint16) []dnsproxy.Addr {
	at := netip.AddrPortFrom(f.Loopback(), port).String()
	return []dnsproxy.Addr{{Network: "udp", Address: at}, {Network: "tcp", Address: at}}
}

// The names of questions. A nameserver on a host with the same name may have the same ID, but not the same version.
const (
	askID       = "id.server."
	askVersion  = "version.server."
	askIdentity = askID + " " + askVersion // two questions, one after the other
)

// A question is a query to a server about the server itself, in class CHAOS (RFC 4892).
type question struct {
	description string // the description of the probe in errors
	network, to string // the server
	name        string
	hops        int           // TTL or hop limit of the packets; 0 means the system's default
	limit       time.Duration // how long the answer may take; 0 means probeTimeout
	asProgram   bool          // whether the socket belongs to ProgramUser; only root can do that
}

// listenerQuestions returns a question with this name for each listener.
func listenerQuestions(name string, listeners ...dnsproxy.Addr) (questions []question) {
	for _, l := range listeners {
		questions = append(questions, question{description: "probing the listener " + l.String(), network: l.Network, to: reachable(l.Address), name: name})
	}
	return questions
}

// ask sends a question. Over UDP it sends the question again every probeRetry until there is an answer, because the
// kernel drops a question while the buffer of the listener is full. ask returns the text of the answer, or "" if the
// answer is not exactly one TXT record. [noRoute] distinguishes errors.
func ask(ctx context.Context, q question) (text string, err error) {
	if q.asProgram && os.Geteuid() == 0 {
		q.asProgram = false
		err = listen.AsUser(ProgramUser, ProgramUser, func() error {
			text, err = ask(ctx, q)
			return err
		})
		return text, err
	}
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
	var texts []string
	for _, name := range strings.Fields(q.name) {
		query := new(dns.Msg).SetQuestion(name, dns.TypeTXT)
		query.Question[0].Qclass = dns.ClassCHAOS
		for answered := false; !answered; {
			reply, _, err := client.ExchangeWithConnContext(ctx, query, &dns.Conn{Conn: conn})
			switch {
			case err == nil:
				texts, answered = append(texts, textOf(reply)), true
			case !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil || time.Since(began) >= limit:
				return "", err
			}
		}
	}
	return strings.Join(texts, " "), nil
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

// queryHops is the TTL or hop limit of the agent's queries to nameservers. The default of this host may be
// [iptables.ProbeHops]: the rules would take these queries for probes, and redirect them to the agent.
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
	if err == nil {
		return nil
	}
	for _, p := range ConntrackCondition().Problems {
		err = fmt.Errorf("%w; the kernel drops new flows, because the table of conntrack is full: %s", err, p.Evidence)
	}
	return err
}

// noRoute reports whether an error means that the host has no address of a family or no route.
func noRoute(err error) bool {
	return isAny(err, syscall.EADDRNOTAVAIL, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EAFNOSUPPORT)
}

// isAny reports whether err is one of these errors.
func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

// listeningFamilies returns the families that a query path listens on over UDP.
func listeningFamilies(proxy *dnsproxy.Server) []family.Family {
	return slices.DeleteFunc(family.All(), func(f family.Family) bool {
		return !slices.ContainsFunc(addrPorts(proxy), func(at netip.AddrPort) bool { return family.Of(at.Addr()) == f })
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
