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
	"sync"
	"time"
)

const (
	// probeInterval is the time between probes, probeTimeout the limit of an answer,
	// hungProbes the number of failures in succession after which the command counts as
	// hung.
	probeInterval = 4 * time.Second
	probeTimeout  = 2 * time.Second
	hungProbes    = 4
)

// A prober probes the UDP sockets.
type prober struct{ targets []netip.AddrPort }

// answers are the results of one probe of each socket: nil if it was answered, errUnasked if it
// could not be sent.
type answers map[netip.AddrPort]error

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

// run probes all sockets in each interval, and sends the results, until ctx ends.
func (p *prober) run(ctx context.Context, results chan<- answers) {
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		select {
		case results <- p.probe(ctx):
		case <-ctx.Done():
			return
		}
	}
}

// errUnasked is the error of a probe that could not be sent: the host does not have the
// address, or the kernel refuses the packet, for example because conntrack is full. Then
// the command may work, and a restart would not help.
var errUnasked = errors.New("the probe cannot be sent")

// probe probes all sockets at the same time.
func (p *prober) probe(ctx context.Context) answers {
	var mu sync.Mutex
	var probing sync.WaitGroup
	found := answers{}
	for _, target := range p.targets {
		probing.Go(func() {
			err := ask(ctx, target)
			mu.Lock()
			defer mu.Unlock()
			found[target] = err
		})
	}
	probing.Wait()
	return found
}

// question is a query for id.server in class CHAOS, type TXT, without its ID. Its answer
// needs no table and no nameserver (RFC 4892).
const question = "\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x02id\x06server\x00\x00\x10\x00\x03"

// ask sends the question and returns an error unless any response arrives: errUnasked if
// the question could not be sent.
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
			return fmt.Errorf("probing the listener %s: %w", target, err)
		}
		if n > 2 && bytes.Equal(response[:2], query[:2]) {
			return nil
		}
	}
}
