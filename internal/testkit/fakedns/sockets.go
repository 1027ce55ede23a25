package fakedns

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// sockets are the sockets of a running server.
type sockets struct {
	addr    netip.AddrPort
	packets *net.UDPConn // nil if UDP is refused
	streams *net.TCPListener
	tls     *tls.Config
	// refusing are the sockets that reserve the port of a refused transport.
	refusing []io.Closer

	goroutines sync.WaitGroup
	// closed ends the waiting of delayed packets.
	closed chan struct{}

	mu    sync.Mutex
	conns map[net.Conn]bool // open connections; nil once closed
}

// listen opens the sockets of s. A port that is free for UDP may be in use for TCP, so it
// tries several ports if any port is allowed.
func (s *Server) listen() (*sockets, error) {
	attempts := 1
	if s.Addr.Port() == 0 {
		attempts = 10
	}
	var errs error
	for range attempts {
		opened := &sockets{addr: s.Addr, tls: s.tls, closed: make(chan struct{}), conns: map[net.Conn]bool{}}
		err := errors.Join(opened.listenUDP(s.noUDP), opened.listenTCP(s.noTCP))
		if err == nil {
			return opened, nil
		}
		opened.close()
		errs = errors.Join(errs, err)
	}
	return nil, errs
}

// listenUDP opens or refuses UDP, and chooses the port.
func (t *sockets) listenUDP(refuse bool) error {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(t.addr))
	if err != nil {
		return err
	}
	t.addr = addrPort(conn.LocalAddr())
	if !refuse {
		t.packets = conn
		_ = conn.SetReadBuffer(4 << 20) // for bursts, if the system allows it
		return nil
	}
	// The kernel refuses packets that are not from the peer of a connected socket. This
	// socket is connected to itself.
	t.refusing = append(t.refusing, conn)
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.Connect(int(fd), sockaddr(t.addr)) })
	return errors.Join(err, failed)
}

// listenTCP opens or refuses TCP on the port of UDP.
func (t *sockets) listenTCP(refuse bool) (err error) {
	if !refuse {
		t.streams, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(t.addr))
		return err
	}
	// The kernel refuses connections to a socket that is bound and does not listen.
	family := unix.AF_INET
	if t.addr.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening a socket: %w", err)
	}
	t.refusing = append(t.refusing, descriptor(fd))
	// Connections of an earlier listener may be left in TIME_WAIT.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return fmt.Errorf("setting up a socket: %w", err)
	}
	if err := unix.Bind(fd, sockaddr(t.addr)); err != nil {
		return fmt.Errorf("binding a socket: %w", err)
	}
	return nil
}

// A descriptor is a file descriptor outside of the net package.
type descriptor int

// Close closes the descriptor.
func (d descriptor) Close() error { return unix.Close(int(d)) }

// sockaddr returns addr in the form of system calls.
func sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
}

// addrPort returns an address of the net package, with IPv4 as IPv4.
func addrPort(addr net.Addr) netip.AddrPort {
	var a netip.AddrPort
	switch addr := addr.(type) {
	case *net.UDPAddr:
		a = addr.AddrPort()
	case *net.TCPAddr:
		a = addr.AddrPort()
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// serve starts the goroutines.
func (t *sockets) serve(s *Server) {
	if t.packets != nil {
		t.goroutines.Go(func() { t.servePackets(s) })
	}
	if t.streams != nil {
		t.goroutines.Go(func() { t.serveStreams(s) })
	}
}

// servePackets answers over UDP until the socket is closed.
func (t *sockets) servePackets(s *Server) {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := t.packets.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		r, ok := newRequest(buf[:n], "udp")
		if !ok {
			continue
		}
		t.goroutines.Go(func() {
			t.send(s.replies(r), func(p Packet) error {
				_, err := t.packets.WriteToUDPAddrPort(p.Bytes, from)
				return err
			})
		})
	}
}

// serveStreams accepts connections until the listener is closed.
func (t *sockets) serveStreams(s *Server) {
	for {
		conn, err := t.streams.AcceptTCP()
		if err != nil {
			return
		}
		s.connected()
		t.goroutines.Go(func() {
			if t.tls != nil {
				t.serveStream(s, tls.Server(conn, t.tls), "tls")
			} else {
				t.serveStream(s, conn, "tcp")
			}
		})
	}
}

// serveStream answers over one connection. It sends each reply when it is ready.
func (t *sockets) serveStream(s *Server, conn net.Conn, network string) {
	defer conn.Close()
	if !t.open(conn) {
		return
	}
	defer t.forget(conn)
	var writing sync.Mutex
	for {
		var length [2]byte
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			return
		}
		buf := make([]byte, binary.BigEndian.Uint16(length[:]))
		if _, err := io.ReadFull(conn, buf); err != nil {
			return
		}
		r, ok := newRequest(buf, network)
		if !ok {
			continue
		}
		t.goroutines.Go(func() {
			t.send(s.replies(r), func(p Packet) error {
				writing.Lock()
				defer writing.Unlock()
				message := append(binary.BigEndian.AppendUint16(nil, uint16(len(p.Bytes))), p.Bytes...)
				if p.Break {
					defer conn.Close()
					message = message[:len(message)/2]
				}
				_, err := conn.Write(message)
				return err
			})
		})
	}
}

// send sends each packet at its time. It ignores errors, because the client may have ended.
func (t *sockets) send(packets []Packet, write func(Packet) error) {
	began := time.Now()
	for _, p := range packets {
		select {
		case <-t.closed:
			return
		case <-time.After(time.Until(began.Add(p.After))):
		}
		_ = write(p)
	}
}

// open registers a connection, unless the server is closed.
func (t *sockets) open(conn net.Conn) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns == nil {
		return false
	}
	t.conns[conn] = true
	return true
}

// forget removes a connection.
func (t *sockets) forget(conn net.Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, conn)
}

// disconnect closes the connections that are open.
func (t *sockets) disconnect() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for conn := range t.conns {
		_ = conn.Close() // its reader ends
	}
}

// close closes everything and waits for the goroutines. It ignores errors, because no data
// needs to be flushed.
func (t *sockets) close() {
	close(t.closed)
	if t.packets != nil {
		_ = t.packets.Close()
	}
	if t.streams != nil {
		_ = t.streams.Close()
	}
	for _, c := range t.refusing {
		_ = c.Close()
	}
	t.disconnect()
	t.mu.Lock()
	t.conns = nil
	t.mu.Unlock()
	t.goroutines.Wait()
}
