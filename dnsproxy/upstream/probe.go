package upstream

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	noProbe    probeQuestion = iota
	probeID                  // the server's identity (RFC 4892)
	probeLocal               // the address of localhost (RFC 6761, section 6.3)
)

// If a server does not answer a query, there are two possible reasons. The server is dead, or it waits for other
// nameservers, which are dead. Probes distinguish these cases: they are questions that a living server answers at
// once, whatever other nameservers do.
//
// There are two questions, because no question is answered at once by all servers. If their own nameservers are
// dead, dnsmasq 2.90 and unbound 1.17 still answer both questions. Neither answers ". NS", which CoreDNS's
// health check asks. CoreDNS itself answers at once for all classes other than IN.

// A probeQuestion selects the question of a probe.
type probeQuestion uint8

// question returns the question in wire form.
func (p probeQuestion) question() []byte {
	if p == probeLocal {
		return wire.AppendQuestion(nil, wire.Localhost, dns.TypeA, dns.ClassINET)
	}
	return wire.AppendQuestion(nil, "\x02id\x06server", dns.TypeTXT, dns.ClassCHAOS)
}

// Loops are found in the same way as by dnsmasq's --dns-loop-detect and CoreDNS's plugin loop: a
// server is asked for a name that no other program knows. If this agent receives the question,
// the server has forwarded it.

const (
	// LoopZone is the domain that the names of loop probes end in. A name has one more label before this domain,
	// because forwarders do not forward names of one label. The domain is not one of the special names of RFC 6761,
	// because many forwarders do not forward these either.
	LoopZone = "nametap-loop-probe."

	probeLen = 16 // random bytes in a name; its first label has them in hex

	// A server may be suspected of a loop again and again, for example because the nameservers behind it are slow. Then
	// it is probed after 1 s, 2 s, 4 s and so on up to 64 s. After two minutes without a probe, the next one is sent at
	// once.
	loopProbePause = time.Second
	maxProbes      = 6 // how often loopProbePause is doubled at most
	probesForget   = 2 * time.Minute
	loopRecheck    = 10 * time.Second
	probeForgets   = 30 * time.Second

	// maxRedirected is how many loop probes in a row may be redirected to the agent before the capture rules are
	// blamed. A few may be redirected by chance, if the application has used the port of the probe's socket before (see
	// Client.Echo).
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
	socket atomic.Pointer[socket] // from which it was sent
	// The client's mutex guards these two. echoed is true if the probe came back to the agent. redirected is true if
	// it came back because the kernel redirected this client's own packet to the agent.
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
	// To is the original destination of a captured question that will be forwarded there. For other questions, To is
	// not valid.
	To netip.AddrPort
}
