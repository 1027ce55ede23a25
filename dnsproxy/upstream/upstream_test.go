package upstream_test

import (
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// Most tests over sockets run in a bubble of testing/synctest in which time stands still: the clock of a bubble waits
// while a goroutine waits for the kernel, as those of nameservers and sockets do. So no query is late, however slow the
// machine is. In such a bubble, a test waits on channels only.

// A raw nameserver passes each packet to a handler of the test, from one goroutine, and sends
// what the handler returns.
type raw struct {
	udp   net.PacketConn
	tcp   net.Listener
	addr  netip.AddrPort
	mu    sync.Mutex
	got   [][]byte // packets
	from  []string // their source addresses
	conns int      // TCP connections so far
	open  []net.Conn
}

type handler func(query []byte, network string) (replies [][]byte)

func serve(tb testing.TB, handle handler) *raw {
	tb.Helper()
	return serveTLS(tb, handle, nil)
}

// serveTLS is serve with TLS in place of TCP, unless config is nil.
func serveTLS(tb testing.TB, handle handler, config *tls.Config) *raw {
	tb.Helper()
	r := &raw{}
	var udp net.PacketConn
	var tcp net.Listener
	var err error
	for range 100 { // a free port for UDP may be taken for TCP
		if udp, err = net.ListenPacket("udp4", "127.0.0.1:0"); err != nil {
			tb.Fatal(err)
		}
		if tcp, err = net.Listen("tcp4", udp.LocalAddr().String()); err == nil {
			break
		}
		udp.Close()
	}
	if err != nil {
		tb.Fatal(err)
	}
	if config != nil {
		tcp = tls.NewListener(tcp, config)
	}
	r.udp, r.tcp = udp, tcp
	r.addr = netip.MustParseAddrPort(udp.LocalAddr().String())
	var running sync.WaitGroup
	tb.Cleanup(func() { udp.Close(); tcp.Close(); r.hangUp(); running.Wait() })
	running.Go(func() {
		buffer := make([]byte, 65535)
		for {
			n, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			query := append([]byte(nil), buffer[:n]...)
			r.note(query, from.String())
			for _, reply := range handle(query, "udp") {
				_, _ = udp.WriteTo(reply, from)
			}
		}
	})
	running.Go(func() { r.accept(tcp, handle, &running) })
	return r
}

func (r *raw) accept(l net.Listener, handle handler, running *sync.WaitGroup) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.conns++
		r.open = append(r.open, conn)
		r.mu.Unlock()
		running.Go(func() {
			defer conn.Close()
			for {
				var length [2]byte
				if _, err := io.ReadFull(conn, length[:]); err != nil {
					return
				}
				query := make([]byte, binary.BigEndian.Uint16(length[:]))
				if _, err := io.ReadFull(conn, query); err != nil {
					return
				}
				r.note(query, conn.RemoteAddr().String())
				replies := handle(query, "tcp")
				if replies == nil {
					return // closes
				}
				for _, reply := range replies {
					_, _ = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...))
				}
			}
		})
	}
}

// hangUp closes all connections.
func (r *raw) hangUp() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range r.open {
		conn.Close()
	}
	r.open = nil
}

func (r *raw) note(query []byte, from string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.got) < 10_000 { // not in benchmarks
		r.got = append(r.got, query)
		r.from = append(r.from, from)
	}
}

// sources returns the addresses that queries came from.
func (r *raw) sources() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	sources := slices.Clone(r.from)
	slices.Sort(sources)
	return slices.Compact(sources)
}

func (r *raw) spec() upstream.Spec { return upstream.Spec{Addr: r.addr} }

// connections returns how many there were.
func (r *raw) connections() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.conns
}

func (r *raw) queries() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([][]byte(nil), r.got...)
}

// query is a question for www.example. A with an OPT record.
func query() []byte {
	return append([]byte{0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1},
		"\x03www\x07example\x00\x00\x01\x00\x01\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"...)
}

const questionEnd = 12 + 13 + 4

// reply is query's header and question as a response, with a code.
func reply(query []byte, rcode byte) []byte {
	end := 12
	for query[end] != 0 {
		end += 1 + int(query[end])
	}
	r := append([]byte(nil), query[:end+1+4]...)
	r[2] |= 0x80
	r[3] |= rcode
	r[11] = 0
	return r
}

// answers returns a handler that answers with a code.
func answers(rcode byte) handler {
	return func(query []byte, _ string) [][]byte { return [][]byte{reply(query, rcode)} }
}

func client(tb testing.TB, config upstream.Config) *upstream.Client {
	tb.Helper()
	config.Timeout = time.Hour
	c := upstream.NewClient(config)
	tb.Cleanup(c.Close)
	return c
}
