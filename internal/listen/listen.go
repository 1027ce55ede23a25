// Package listen opens the sockets on which a process serves, and keeps them over its restarts. It also has what loops
// of listeners need: which errors pass, and how long to wait after them.
//
//	listen.go     Set: the sockets of one setting; opening them, also later, and serving them
//	inherited.go  Inherited: the sockets that another process has held; sockets that systemd keeps for the next process
//	accept.go     errors of listening sockets, and pauses after them
//	addr.go       addresses to listen on, and addresses of this host
package listen

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
)

// A Spec says which sockets a [Set] has.
type Spec struct {
	// Name says what the sockets are for, and Setting is the setting of Addr. Both are for texts.
	Name, Setting string
	// Addr is a host:port as [SplitAddr] takes it. If the port is 0, the kernel chooses one port for all sockets.
	Addr string
	// Networks are "udp", "tcp" or both.
	Networks []string
	// Listen opens the only listener of the Set; then Setting, Addr and Networks have no effect. It may be nil.
	Listen func(context.Context) (net.Listener, error)
	// Control is called with each socket before it is bound, and with each inherited socket. It may be nil.
	Control func(network, address string, conn syscall.RawConn) error
	// FreeBind opens sockets on loopback addresses that this host does not have yet: IPv6 may be switched on later.
	FreeBind bool
	// Required says that the process cannot do without: [Set.Open] fails if it can open no socket, and [Set.Serve] if
	// a socket fails. Otherwise these are opened later, unless the address is wrong.
	Required bool
	// Keep lets systemd keep the sockets for the next process.
	Keep bool
	// Opened is called with the addresses of all open sockets when one is open that was missing. It may be nil.
	Opened func([]netip.AddrPort)
	// Log is the log.
	Log *slog.Logger
}

// A Set is the sockets of one setting. Its methods are safe for concurrent use once Open has returned.
type Set struct {
	spec   Spec
	port   uint16
	places []*place // IPv4 before IPv6, UDP before TCP

	mu   sync.Mutex // guards the sockets and errors of places, and held
	held bool
}

// A place is a socket, or an address at which the socket is missing.
type place struct {
	network string
	host    netip.Addr
	socket  *Socket
	err     error // why the socket is missing
}

// A Socket is an open socket.
type Socket struct {
	Addr
	Conn        // a net.UDPConn or a net.Listener
	name string // the name that systemd gives it
}

// A Conn is what UDP sockets and listeners have in common.
type Conn interface {
	syscall.Conn
	io.Closer
	File() (*os.File, error)
}

// newSocket returns the Socket of a UDP socket or a listener.
func newSocket(opened any) (*Socket, error) {
	conn, ok := opened.(Conn)
	switch opened := opened.(type) {
	case net.Listener:
		if ok {
			return &Socket{Addr: addrOf(opened.Addr()), Conn: conn}, nil
		}
	case *net.UDPConn:
		return &Socket{Addr: addrOf(opened.LocalAddr()), Conn: conn}, nil
	}
	return nil, fmt.Errorf("it is a %T", opened)
}

// withFD calls f with the descriptor of a socket. Unlike the method Fd of a file, that does not set it to block.
func withFD(socket syscall.Conn, f func(fd int) error) error {
	conn, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := conn.Control(func(fd uintptr) { err = f(int(fd)) }) //nolint:gosec // a descriptor
	return cmp.Or(controlErr, err)
}

// New returns a Set with the sockets of the Spec that are inherited. If they come from a socket unit of systemd, there
// are no others, because the unit says which ones its user wants.
func New(spec Spec, inherited *Inherited) (*Set, error) {
	s := &Set{spec: spec}
	if spec.Listen != nil {
		s.places = []*place{{}}
		return s, nil
	}
	hosts, port, err := SplitAddr(spec.Setting, spec.Addr)
	if err != nil {
		return nil, err
	}
	s.port = port
	taken, complete := inherited.take(&spec, hosts, port)
	s.held = len(taken) > 0
	for _, socket := range taken {
		conn, err := socket.SyscallConn()
		if err == nil && spec.Control != nil {
			err = spec.Control(socket.Network, socket.Address, conn)
		}
		if err != nil {
			return nil, fmt.Errorf("inherited socket %s: %w", socket.Addr, err)
		}
		s.places = append(s.places, &place{network: socket.Network, host: socket.AddrPort().Addr(), socket: socket})
	}
	for _, host := range hosts {
		for _, network := range spec.Networks {
			same := func(p *place) bool { return p.network == network && p.host == host }
			if !complete && !slices.ContainsFunc(s.places, same) {
				s.places = append(s.places, &place{network: network, host: host})
			}
		}
	}
	slices.SortStableFunc(s.places, func(a, b *place) int {
		return cmp.Or(cmp.Compare(a.host.BitLen(), b.host.BitLen()), -cmp.Compare(a.network, b.network))
	})
	return s, nil
}

// If the kernel chooses the port, the port of the first socket may not be free for the others. Then another port is
// tried, up to portAttempts times.
const portAttempts = 10

// Open opens the sockets that are missing, and logs those that it cannot open. It fails if none is open, and the Set is
// Required or the address is wrong: this host does not have it, or this process may not use it.
func (s *Set) Open(ctx context.Context) error {
	port := s.port
	errs := s.openAll(ctx)
	for range portAttempts {
		if port != 0 || s.spec.Listen != nil || !errors.Is(errors.Join(errs...), unix.EADDRINUSE) {
			break
		}
		for _, p := range s.places {
			if p.socket != nil {
				_ = p.socket.Close() // it was not served
			}
			p.socket = nil
		}
		s.port = 0
		errs = s.openAll(ctx)
	}
	passes := func(err error) bool { return !noFamily(err) && !errors.Is(err, fs.ErrPermission) }
	if len(errs) == len(s.places) && s.spec.Listen == nil && (s.spec.Required || !slices.ContainsFunc(errs, passes)) {
		want := "an address of this host, with a port that no other program has"
		if errors.Is(errs[0], fs.ErrPermission) {
			want = "a port above 1023, or the capability CAP_NET_BIND_SERVICE"
		}
		return fmt.Errorf("%s %q: want %s: %w", s.spec.Setting, s.spec.Addr, want, errors.Join(errs...))
	}
	for _, err := range errs {
		s.logMissing(err)
	}
	s.keep(s.places...)
	return nil
}

// openAll opens the sockets that are missing, on one port.
func (s *Set) openAll(ctx context.Context) (errs []error) {
	for _, p := range s.places {
		if p.socket != nil {
			continue
		}
		if err := s.open(ctx, p); err != nil {
			errs = append(errs, err)
		} else if s.port == 0 && s.spec.Listen == nil {
			s.port = p.socket.AddrPort().Port()
		}
	}
	return errs
}

// open opens the socket of a place.
func (s *Set) open(ctx context.Context, p *place) error {
	socket, err := s.listen(ctx, p)
	s.mu.Lock()
	defer s.mu.Unlock()
	p.socket, p.err = socket, err
	return err
}

// listen opens the socket of a place.
func (s *Set) listen(ctx context.Context, p *place) (*Socket, error) {
	if s.spec.Listen != nil {
		listener, err := s.spec.Listen(ctx)
		if err != nil {
			return nil, err
		}
		return newSocket(listener)
	}
	// There is no keepalive, because the servers close idle connections themselves, and no Multipath TCP, because the
	// kernel does not report the original destination of such connections.
	config := net.ListenConfig{KeepAlive: -1, Control: func(network, address string, conn syscall.RawConn) error {
		var err error
		if s.spec.FreeBind && p.host.IsLoopback() {
			controlErr := conn.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) //nolint:gosec // a descriptor
			})
			err = errors.Join(controlErr, err)
		}
		if s.spec.Control != nil {
			err = errors.Join(err, s.spec.Control(network, address, conn))
		}
		return err
	}}
	config.SetMultipathTCP(false)
	family, address := "6", netip.AddrPortFrom(p.host, s.port).String()
	if p.host.Is4() {
		family = "4"
	}
	if p.network == "udp" {
		conn, err := config.ListenPacket(ctx, "udp"+family, address)
		if err != nil {
			return nil, err
		}
		return newSocket(conn)
	}
	listener, err := config.Listen(ctx, "tcp"+family, address)
	if err != nil {
		return nil, err
	}
	return newSocket(listener)
}

// noFamily reports whether err means that the host has no address of the family: IPv6 may be switched off.
func noFamily(err error) bool {
	return errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT)
}

// NoRoute reports whether err means that this host has no route to an address, or no address of its family.
func NoRoute(err error) bool {
	return noFamily(err) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH)
}

// logMissing logs why a socket is missing.
func (s *Set) logMissing(err error) {
	if noFamily(err) {
		s.spec.Log.Info("a listener waits until this host has its address", "for", s.spec.Name, "error", err)
		return
	}
	s.spec.Log.Warn("degraded: a listener cannot be opened; retrying", "for", s.spec.Name, "error", err)
}

// Serve calls the function serve with each socket on a goroutine of its own, also with those that are opened later, and
// then closes the socket. The function must return when ctx ends. When it fails, a Set that is Required ends, and
// another one opens the socket again. Serve returns when all calls have returned.
func (s *Set) Serve(ctx context.Context, serve func(context.Context, *Socket) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range s.places {
		group.Go(func() error {
			for {
				socket := s.await(ctx, p)
				if socket == nil {
					return nil
				}
				err := serve(ctx, socket)
				_ = socket.Close() // serve may have closed it
				if err == nil || s.spec.Required {
					return err
				}
				s.logMissing(err)
				s.mu.Lock()
				p.socket, p.err = nil, err
				s.mu.Unlock()
			}
		})
	}
	return group.Wait()
}

// await returns the socket of a place, which it opens if it is missing. It returns nil if ctx ends before that.
func (s *Set) await(ctx context.Context, p *place) *Socket {
	if p.socket != nil { // only this goroutine changes it
		return p.socket
	}
	if !clock.Retry(ctx, func() bool { return s.open(ctx, p) == nil }) {
		return nil
	}
	s.spec.Log.Info("a missing listener is open now", "for", s.spec.Name, "listener", p.socket.Addr)
	s.keep(p)
	if s.spec.Opened != nil {
		s.spec.Opened(s.AddrPorts())
	}
	return p.socket
}

// Missing returns why sockets are missing. It leaves out those of a family that the host does not have.
func (s *Set) Missing() (errs []error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.places {
		if p.err != nil && !noFamily(p.err) {
			errs = append(errs, p.err)
		}
	}
	return errs
}

// Addrs returns the addresses of the open sockets.
func (s *Set) Addrs() []Addr {
	addrs := []Addr{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.places {
		if p.socket != nil {
			addrs = append(addrs, p.socket.Addr)
		}
	}
	return addrs
}

// AddrPorts returns the addresses of the open sockets.
func (s *Set) AddrPorts() (addrs []netip.AddrPort) {
	for _, a := range s.Addrs() {
		addrs = append(addrs, a.AddrPort())
	}
	return addrs
}

// Held reports whether another process holds the sockets, too, so that clients can wait for the next process.
func (s *Set) Held() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held
}

// Files closes the open sockets and returns duplicates of them, for another process. The caller closes the files.
func (s *Set) Files() (files []*os.File, err error) {
	for _, p := range s.places {
		if p.socket == nil {
			continue
		}
		file, fileErr := p.socket.File()
		files, err = append(files, file), errors.Join(err, fileErr, p.socket.Close())
	}
	return files, err
}
