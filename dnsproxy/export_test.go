package dnsproxy

import (
	"context"
	"time"
)

// productTimeouts are the timeouts that connections of clients have without patience.
var productTimeouts = patience()

// patience gives clients of these tests so much time that no machine is too slow.
func patience() (product struct{ idle, brief, write time.Duration }) {
	product = tcpTimeouts
	tcpTimeouts.idle, tcpTimeouts.write = time.Hour, 2*time.Hour
	return product
}

// Serve answers a packet over "udp" or "tcp" as a listener does, but without a socket: so time passes in a bubble of
// testing/synctest.
func (s *Server) Serve(network string, packet []byte) []byte {
	t, from := newTask(), &arrival{protocol: overUDP, client: noClient, local: noClient}
	if network == "tcp" {
		from.protocol = overTCP
	}
	t.begin(packet, from)
	if response, verdict := s.handler.answerFast(nil, t); verdict != deferred {
		return response
	}
	return t.handler.answerSlow(t)
}

// Follow follows resolv.conf until ctx ends, as Run does.
func (s *Server) Follow(ctx context.Context) error { return s.handler.forwarder.Run(ctx) }
