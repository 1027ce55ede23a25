package upstream

import (
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	noProbe    probe = iota
	probeID          // the server's identity (RFC 4892)
	probeLocal       // the address of localhost (RFC 6761, section 6.3)
	probeKnown       // the last question that the server had an answer to
)

// A server that does not answer a query may be dead, or may be waiting for the nameservers of the query's name, which
// are dead. Probes distinguish these cases: they are questions that a living server answers at once, whatever other
// nameservers do.
//
// The questions alternate, because no question is answered like this by all servers. With dead nameservers behind them,
// dnsmasq 2.90 and unbound 1.17 answer the first two questions, and neither answers ". NS", which CoreDNS's health
// check asks. CoreDNS itself answers for all classes other than IN. Other servers answer the last question that they
// had an answer to.

// A probe says which question a probe asks.
type probe uint8

// question returns the question in wire form, empty if there is none.
func (p probe) question(known []byte) []byte {
	switch p {
	case probeLocal:
		return wire.AppendQuestion(nil, wire.Localhost, dns.TypeA, dns.ClassINET)
	case probeKnown:
		return known
	default:
		return wire.AppendQuestion(nil, "\x02id\x06server", dns.TypeTXT, dns.ClassCHAOS)
	}
}

// Loops are found in the same way as by dnsmasq's --dns-loop-detect and CoreDNS's plugin loop: a
// server is asked for a name that no other program knows. If this agent receives the question,
// the server has forwarded it.

const (
	// LoopZone is the domain of the names of loop probes, which are one label below it. The names have two labels,
	// because forwarders do not forward names of one label. The zone is not one of the special names of RFC 6761, which
	// many forwarders do not forward either.
	LoopZone = "nametap-loop-probe."

	probeLen = 16 // bytes; the label has twice as many letters

	// A server that is suspected repeatedly, such as one whose names are slow, is
	// probed after 1 s, 2 s, 4 s and so on up to 64 s. After two minutes without a
	// probe, the next one is sent at once.
	loopProbePause = time.Second
	maxProbes      = 6 // doublings of loopProbePause
	probesForget   = 2 * time.Minute
	loopRecheck    = 10 * time.Second
	probeForgets   = 30 * time.Second

	// maxRedirected is how many loop probes in a row may be redirected to the agent by chance, because
	// the application has used the same ports before.
	maxRedirected = 3
)

// redirectedAlways is the text in the log and the status if more than maxRedirected probes in a row are redirected.
const redirectedAlways = "the capture rules redirect the agent's own queries to the agent: " +
	"run it as a user of --capture-agent-uid or as a group of --capture-agent-gid"

// A loopProbe is a question sent to a server to see whether it comes back.
type loopProbe struct {
	id     [probeLen]byte
	server *server
	sent   time.Time
	// Both are guarded by the client's mutex. echoed is true if the probe came back. redirected is true if it
	// came back because the kernel redirected this client's own packet to the agent.
	echoed, redirected bool
}

// loopSuffix is LoopZone in wire form.
func loopSuffix() wire.Name {
	const label = len(LoopZone) - 1
	return wire.Name(append([]byte{byte(label)}, LoopZone[:label]...))
}

// An Arrival is how the agent received a question.
type Arrival struct {
	// From is the address that the question came from.
	From netip.AddrPort
	// To is the original destination of a captured question that will be forwarded there, and
	// not valid for other questions.
	To netip.AddrPort
}
