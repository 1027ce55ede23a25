package upstream

import (
	crypto "crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Loops are found in the same way as by dnsmasq's --dns-loop-detect and CoreDNS's plugin loop: a
// server is asked for a name that no other program knows. If this agent receives the question,
// the server has forwarded it.

const (
	// LoopZone is the domain that the names of loop probes end in. A name has one more label before this domain,
	// because forwarders do not forward names of one label. The domain is not one of the special names of RFC 6761,
	// because many forwarders do not forward these either.
	LoopZone = "nametap-loop-probe."

	probeLen = 16 // random bytes in a name; its first label has them in hex

	// A server may be late again and again, for example because the nameservers behind it are slow. It is probed at most
	// once in loopPause or, if it loops, in loopRecheck.
	loopPause    = time.Second
	loopRecheck  = 10 * time.Second
	probeForgets = 30 * time.Second

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
	id      [probeLen]byte
	server  *server
	sent    time.Time
	sending atomic.Pointer[sending]
	// echoed is true if the probe came back to the agent. redirected is true if it came back because the kernel redirected
	// this client's own packet to the agent.
	echoed, redirected atomic.Bool
}

// A sending is a message that was sent: its ID, and the socket from which it was sent.
type sending struct {
	socket *socket
	id     uint16
}

// loopSuffix is LoopZone in wire form.
func loopSuffix() wire.Name {
	const label = len(LoopZone) - 1
	return wire.Name(append([]byte{byte(label)}, LoopZone[:label]...))
}

// probeForLoop sends a loop probe if one is due. It is called if the server is late for a query, because it may have sent
// the query back, or if it is known to loop. [Client.Echo] recognises the probes that come back.
func (s *server) probeForLoop(now time.Time) {
	s.mu.Lock()
	pause := loopPause
	if s.history.looping != "" {
		pause = loopRecheck
	}
	due := now.Sub(s.loopProbed) >= pause
	if due {
		s.loopProbed = now
	}
	s.mu.Unlock()
	if !due {
		return
	}
	probe := &loopProbe{server: s, sent: now}
	_, _ = crypto.Read(probe.id[:]) // cannot fail
	s.client.mu.Lock()
	for id, old := range s.client.probes {
		if now.Sub(old.sent) > probeForgets {
			delete(s.client.probes, id)
		}
	}
	s.client.probes[probe.id] = probe
	s.client.mu.Unlock()
	name := wire.Name(hex.AppendEncode([]byte{2 * probeLen}, probe.id[:])) + loopSuffix()
	question := wire.AppendQuestion(nil, name, dns.TypeTXT, dns.ClassINET)
	s.sendAttempt(&attempt{server: s, loopProbe: probe, sent: now, text: question})
}

// Echo is to be called with the name and the message of every question below [LoopZone] that the agent receives. to is
// the original destination of a captured question that will be forwarded there. For other questions, to is not valid.
//
// It reports whether the question is a probe of this client that came back. If it has another ID than the client has
// given it, another program has forwarded it (RFC 5452, section 9.2), and the probe's server loops. With the same ID, it
// is the client's own packet, and the kernel has redirected it to the agent. The kernel does so if the application has
// used the same port before, and the capture rules have no conntrack zone that separates the agent from the application.
// The source port says nothing: the kernel may change it. The socket is then used no more. If several probes in a row are
// redirected, the capture rules redirect all queries of the agent, and the server counts as looping.
//
// Echo reports false for a captured probe on its way to an address other than the server's. Such a probe has passed
// through a forwarder on this host, which is not a loop.
//
// A server that loops is not asked any more until it answers a probe itself. Such probes are at least ten seconds
// apart. If Echo reports true, the caller should answer the question with REFUSED: then the question is not sent again.
func (c *Client) Echo(name wire.Name, message []byte, to netip.AddrPort) bool {
	const label = 2 * probeLen
	var id [probeLen]byte
	if len(name) < 1+label || name[0] != label || name[1+label:] != loopSuffix() {
		return false
	}
	if _, err := hex.Decode(id[:], []byte(name[1:1+label])); err != nil {
		return false
	}
	c.mu.Lock()
	probe := c.probes[id]
	c.mu.Unlock()
	if probe == nil || to.IsValid() && to != probe.server.spec.Addr {
		return false
	}
	s, sent := probe.server, probe.sending.Load()
	redirected := sent != nil && sent.id == binary.BigEndian.Uint16(message)
	if redirected {
		sent.socket.retire() // sweep closes it
	}
	probe.redirected.Store(redirected)
	probe.echoed.Store(true)
	if !redirected {
		s.setLooping(ErrLoop.Error())
		return true
	}
	s.mu.Lock()
	s.redirected++
	always := s.redirected > maxRedirected
	s.mu.Unlock()
	if always {
		s.setLooping(redirectedAlways)
	}
	return true
}

// loopProbeAnswered is called when there is a reply to a loop probe. It reports whether the server sent this reply:
// if the probe was redirected to the agent, the agent sent the reply.
func (s *server) loopProbeAnswered(probe *loopProbe) bool {
	if !probe.echoed.Load() {
		s.setLooping("")
	}
	return !probe.redirected.Load()
}

// setLooping notes why the server loops, or by "" that it does not, and logs a change.
func (s *server) setLooping(reason string) {
	s.mu.Lock()
	changed := (s.history.looping == "") != (reason == "")
	s.history.looping = reason
	if reason == "" {
		s.redirected = 0
	}
	s.mu.Unlock()
	switch {
	case changed && reason != "":
		s.setLastError(reason)
		s.logs(slog.LevelWarn, "nameserver is no longer used: "+reason)
	case changed:
		s.logs(slog.LevelInfo, "nameserver is used again: its queries no longer come back")
	}
}
