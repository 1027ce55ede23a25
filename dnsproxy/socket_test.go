package dnsproxy_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// Responses for mesh names and forwarded names come from the address that the client
// queried: a connected socket accepts no other.
func TestSourceAddress(t *testing.T) { // K1
	up := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetReply(query) })
	p := start(t, dnsproxy.Config{Addr: ":0", Forward: forward.Config{Upstreams: servers(up)}})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	for _, addr := range p.Addrs() {
		_, port, err := net.SplitHostPort(addr.Address)
		if err != nil {
			t.Fatal(err)
		}
		clients := []string{"127.0.0.1", "127.0.0.2", "127.9.8.7"}
		if addr.Address[0] == '[' {
			clients = families("::1")
		}
		for _, asked := range clients {
			for _, name := range []string{"web.", "elsewhere.example."} {
				exchange(t, addr.Network, net.JoinHostPort(asked, port), question(name, dns.TypeA))
			}
		}
	}
}

// A client that closes its sending side gets all its answers, also the one of a slow
// nameserver, and then the end of the stream.
func TestHalfClosed(t *testing.T) { // A12
	synctest.Test(t, func(t *testing.T) {
		asked, release := make(chan struct{}), make(chan struct{})
		up := nameserver(t, func(query *dns.Msg, _ string) *dns.Msg {
			close(asked)
			<-release
			return new(dns.Msg).SetReply(query)
		})
		p := start(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(up)}})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
		conn := p.dial(t, "tcp")
		defer conn.Close()
		for _, name := range []string{"elsewhere.example.", "web."} {
			packet, err := question(name, dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			write(t, conn, packet)
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		<-asked
		for range 2 {
			read(t, conn)
			select {
			case <-release:
			default:
				close(release)
			}
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("after the answers: %v", err)
		}
	})
}

// Queries sent before the shutdown are answered (R1), although they are read only after it
// has begun.
func TestShutdownPipelined(t *testing.T) { // R1
	synctest.Test(t, func(t *testing.T) {
		const queries = 500
		for range 5 {
			ctx, end := context.WithCancel(t.Context())
			p := startIn(ctx, t, dnsproxy.Config{})
			p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
			conn := p.dial(t, "tcp")
			packet, err := question("web", dns.TypeA).Pack()
			if err != nil {
				t.Fatal(err)
			}
			var batch []byte
			for range queries {
				batch = append(binary.BigEndian.AppendUint16(batch, uint16(len(packet))), packet...)
			}
			// One answer shows that the connection was accepted.
			write(t, conn, packet)
			read(t, conn)
			if _, err := conn.Write(batch); err != nil {
				t.Fatal(err)
			}
			end()
			for range queries {
				read(t, conn)
			}
			_ = conn.Close()
			if err := <-p.ended; err != nil {
				t.Error(err)
			}
		}
	})
}
