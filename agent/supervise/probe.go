package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
)

const (
	// probeInterval is the time between probes, and the time that an answer may take. After hungProbes failed
	// probes in succession, the command counts as hung.
	probeInterval = 4 * clock.Tick
	hungProbes    = 4
)

// A prober probes the UDP sockets. It does not wait for answers, but reads them when it sends the next queries. So the
// process wakes up only once for each probe.
type prober struct {
	targets  []netip.AddrPort
	starts   *atomic.Int64           // number of starts of the command
	hung     chan error              // gets the reason each time that the command hangs
	life     int64                   // the number of the command's start to which the next two fields belong
	misses   int                     // failed probes in succession
	answered map[netip.AddrPort]bool // sockets on which the command has answered since its start
}

// answers has the result of a probe for each socket: nil if the socket has answered, errUnasked if the probe could
// not be sent, and another error if there was no answer.
type answers map[netip.AddrPort]error

// newProber returns a prober of the UDP sockets among sockets.
func newProber(sockets []*os.File, starts *atomic.Int64) (*prober, error) {
	p := &prober{starts: starts, hung: make(chan error), answered: map[netip.AddrPort]bool{}}
	for _, socket := range sockets {
		conn, err := net.FilePacketConn(socket)
		if err != nil {
			continue // a TCP socket
		}
		at, err := netip.ParseAddrPort(conn.LocalAddr().String())
		_ = conn.Close() // a duplicate
		if err != nil {
			return nil, fmt.Errorf("reading the address of a DNS socket: %w", err)
		}
		if at.Addr().IsUnspecified() {
			at = netip.AddrPortFrom(family.Of(at.Addr()).Loopback(), at.Port())
		}
		p.targets = append(p.targets, at)
	}
	if len(p.targets) == 0 {
		return nil, errors.New("there is no UDP socket to hold")
	}
	return p, nil
}

// run probes all sockets until ctx ends. When the command hangs, run sends the reason to the channel hung.
func (p *prober) run(ctx context.Context) {
	sent := map[netip.AddrPort]*query{}
	defer func() { p.read(sent) }()
	due, stop := clock.ForPolling(clock.Tick).Poll(probeInterval, func() bool { return true })
	defer stop()
	for {
		select {
		case <-due:
		case <-ctx.Done():
			return
		}
		found := p.read(sent)
		for _, target := range p.targets {
			sent[target] = ask(target)
		}
		if life := p.starts.Load(); life != p.life {
			p.life, p.misses, p.answered = life, 0, map[netip.AddrPort]bool{}
		}
		if err := p.countProbe(found); err != nil {
			select {
			case p.hung <- err:
			case <-ctx.Done():
			}
		}
	}
}

// read returns the answers to the queries in sent, and removes these queries.
func (p *prober) read(sent map[netip.AddrPort]*query) answers {
	found := answers{}
	for target, q := range sent {
		found[target] = q.read(target)
		delete(sent, target)
	}
	return found
}

// countProbe counts the probe whose answers are in found. It returns an error if this is the hungProbes-th failed
// probe in succession. It does so even after a signal to end, because the command should answer until it closes its
// sockets.
func (p *prober) countProbe(found answers) error {
	err := p.silenceError(found)
	switch {
	case err == nil:
		p.misses = 0
		return nil
	case errors.Is(err, errUnasked):
		return nil
	}
	if p.misses++; p.misses != hungProbes {
		return nil
	}
	return err
}

// silenceError returns an error in two cases: there is no answer on a socket on which the command has answered since
// its start, or there is no answer on any socket. In other cases, a socket on which the command has never answered may
// be silent, because one of the two families may not work on this host. silenceError returns errUnasked if no probe
// could be sent.
func (p *prober) silenceError(found answers) error {
	var stopped, silent, unasked error
	served := false
	for target, err := range found {
		switch {
		case err == nil:
			served, p.answered[target] = true, true
		case errors.Is(err, errUnasked):
			unasked = errors.Join(unasked, err)
		default:
			silent = errors.Join(silent, err)
			if p.answered[target] {
				stopped = errors.Join(stopped, err)
			}
		}
	}
	switch {
	case stopped != nil || served:
		return stopped
	case silent != nil:
		return silent
	}
	return unasked
}

var (
	// errUnasked is the error of a probe that could not be sent: the host does not have the address, or the kernel
	// refuses the packet, for example because conntrack is full. The command may work nevertheless, and a restart
	// would not help.
	errUnasked = errors.New("the probe cannot be sent")
	// errSilent is the error of a probe without an answer.
	errSilent = errors.New("no answer")
)

// question is a query for id.server in class CHAOS, type TXT, without the ID at its start. Its answer
// needs no table and no nameserver (RFC 4892).
const question = "\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x02id\x06server\x00\x00\x10\x00\x03"

// A query is a query in flight, with its own socket.
type query struct {
	socket int
	id     [2]byte
	err    error // why the query could not be sent; then socket is not open
}

// ask sends the question to target.
func ask(target netip.AddrPort) *query {
	id := rand.Uint32()
	q := &query{id: [2]byte{byte(id >> 8), byte(id)}} //nolint:gosec // two of its bytes
	family, to := sockaddr(target)
	if q.socket, q.err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); q.err != nil {
		return q
	}
	if q.err = unix.Connect(q.socket, to); q.err == nil {
		_, q.err = unix.Write(q.socket, append(q.id[:], question...))
	}
	if q.err != nil {
		_ = unix.Close(q.socket)
	}
	return q
}

// sockaddr returns the family of an address, and the address in the form of the kernel, in which a link-local address
// has the index of its interface.
func sockaddr(addr netip.AddrPort) (family int, to unix.Sockaddr) {
	if addr.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	six := &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
	if link, err := net.InterfaceByName(addr.Addr().Zone()); err == nil {
		six.ZoneId = uint32(link.Index) //nolint:gosec // the kernel's int
	}
	return unix.AF_INET6, six
}

// read returns nil if a response has arrived, errUnasked if the question could not be sent, and otherwise another error.
// It closes the socket.
func (q *query) read(target netip.AddrPort) error {
	if q.err != nil {
		return fmt.Errorf("%w to %s: %w", errUnasked, target, q.err)
	}
	defer func() { _ = unix.Close(q.socket) }()
	response := make([]byte, 512)
	for {
		n, err := unix.Read(q.socket, response)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("probing the listener %s: %w", target, errSilent)
		case err != nil:
			return fmt.Errorf("probing the listener %s: %w", target, err)
		case bytes.HasPrefix(response[:n], q.id[:]):
			return nil
		}
	}
}
