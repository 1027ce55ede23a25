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
	"time"
)

const (
	// probeInterval is how often the sockets are probed, probeTimeout how long an answer
	// may take, hungProbes how many failures in a row mean that the command hangs.
	probeInterval = 4 * time.Second
	probeTimeout  = 2 * time.Second
	hungProbes    = 4
)

// A prober asks the UDP sockets whether they answer. One answer is enough: a family can
// be switched off.
type prober struct{ targets []netip.AddrPort }

// newProber returns a prober of the UDP sockets.
func newProber(sockets []*os.File) (*prober, error) {
	p := &prober{}
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
			loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
			if at.Addr().Is6() {
				loopback = netip.IPv6Loopback()
			}
			at = netip.AddrPortFrom(loopback, at.Port())
		}
		p.targets = append(p.targets, at)
	}
	if len(p.targets) == 0 {
		return nil, errors.New("there is no UDP socket to hold")
	}
	return p, nil
}

// run tells the result of a probe each interval until ctx ends.
func (p *prober) run(ctx context.Context, results chan<- error) {
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		err := p.probe(ctx)
		select {
		case results <- err:
		case <-ctx.Done():
			return
		}
	}
}

// errUnasked says that a question could not be sent: the host does not have the address,
// or the kernel cannot take a packet more, as when conntrack is full. It says nothing about
// the command, which a restart would not help.
var errUnasked = errors.New("the question cannot be sent")

// probe returns an error unless a socket answers: errUnasked if none could be asked.
func (p *prober) probe(ctx context.Context) error {
	errs := make(chan error, len(p.targets))
	for _, target := range p.targets {
		go func() { errs <- ask(ctx, target) }()
	}
	var silent, unasked error
	for range p.targets {
		err := <-errs
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errUnasked):
			unasked = errors.Join(unasked, err)
		default:
			silent = errors.Join(silent, err)
		}
	}
	if silent != nil {
		return silent
	}
	return unasked
}

// question is a query for id.server in class CHAOS, type TXT, without its ID: it needs no
// table and no nameserver (RFC 4892).
const question = "\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x02id\x06server\x00\x00\x10\x00\x03"

// ask returns an error unless a response comes, whatever it says: errUnasked if the
// question could not be sent.
func ask(ctx context.Context, target netip.AddrPort) error {
	conn, err := (&net.Dialer{Timeout: probeTimeout}).DialContext(ctx, "udp", target.String())
	if err != nil {
		return fmt.Errorf("%w: %w", errUnasked, err)
	}
	defer func() { _ = conn.Close() }()
	id := rand.Uint32()
	query := append([]byte{byte(id >> 8), byte(id)}, question...) //nolint:gosec // two of its bytes
	if err := conn.SetDeadline(time.Now().Add(probeTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write(query); err != nil {
		return fmt.Errorf("%w: %w", errUnasked, err)
	}
	response := make([]byte, 512)
	for {
		n, err := conn.Read(response)
		if err != nil {
			return fmt.Errorf("asking our own listener %s: %w", target, err)
		}
		if n > 2 && bytes.Equal(response[:2], query[:2]) {
			return nil
		}
	}
}
