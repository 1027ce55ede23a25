package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/iptables"
)

// probeTimeout is how long a listener has to answer a probe.
const probeTimeout = time.Second

// A health is what a probe of the listeners of one family found.
type health struct {
	answering int   // listeners that answer
	asked     int   // listeners that the question was sent to
	err       error // why the others do not answer, nil if all do
}

// answers reports whether all listeners of the family answer, of which there is one.
func (h health) answers() bool { return h.answering > 0 && h.err == nil }

// absent reports whether the host does not have the addresses of the family now: a
// socket can be open on ::1 while IPv6 is switched off.
func (h health) absent() bool {
	if h.answering > 0 {
		return false // all ports are in use, for one
	}
	for _, absent := range []error{syscall.EADDRNOTAVAIL, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EAFNOSUPPORT} {
		if errors.Is(h.err, absent) {
			return true
		}
	}
	return false
}

// probe asks all listeners at the same time and says how those of each family do. They
// are asked for what needs no table and no nameserver (RFC 4892).
func probe(ctx context.Context, listeners []dnsproxy.Addr) map[iptables.Family]health {
	var mu sync.Mutex
	found := map[iptables.Family]health{}
	var asking sync.WaitGroup
	for _, l := range listeners {
		asking.Go(func() {
			err := ask(ctx, l)
			mu.Lock()
			defer mu.Unlock()
			h := found[family(l)]
			if err == nil {
				h.answering++
			}
			if !unasked(err) {
				h.asked++
			}
			h.err = errors.Join(h.err, err)
			found[family(l)] = h
		})
	}
	asking.Wait()
	return found
}

// ask returns an error unless a listener answers.
func ask(ctx context.Context, l dnsproxy.Addr) error {
	query := new(dns.Msg).SetQuestion("id.server.", dns.TypeTXT)
	query.Question[0].Qclass = dns.ClassCHAOS
	client := dns.Client{Net: l.Network, Timeout: probeTimeout}
	if _, _, err := client.ExchangeContext(ctx, query, reachable(l.Address)); err != nil {
		return fmt.Errorf("probing the listener %s: %w", l, err)
	}
	return nil
}

// silent returns why listeners do not answer, one text for each that does not.
func silent(ctx context.Context, listeners []dnsproxy.Addr) []string {
	errs := make([]error, len(listeners))
	var asking sync.WaitGroup
	for i, l := range listeners {
		asking.Go(func() { errs[i] = ask(ctx, l) })
	}
	asking.Wait()
	var texts []string
	for _, err := range errs {
		if err != nil {
			texts = append(texts, err.Error())
		}
	}
	return texts
}

// family returns the one that a listener is for.
func family(l dnsproxy.Addr) iptables.Family {
	if addr, err := netip.ParseAddrPort(l.Address); err == nil && addr.Addr().Is4() {
		return iptables.IPv4
	}
	return iptables.IPv6
}

// unasked reports whether the question could not be sent: the kernel cannot take a packet
// more, as when conntrack is full, the process has no descriptors left, or the host does
// not have the address. It says nothing about a listener for UDP.
func unasked(err error) bool {
	op := new(net.OpError)
	return errors.As(err, &op) && op.Op != "read"
}

// anyAnswers returns an error if listeners for UDP were asked and none answers.
func anyAnswers(ctx context.Context, listeners []dnsproxy.Addr) error {
	var errs []error
	asked := 0
	for _, h := range probe(ctx, listeners) {
		if h.answering > 0 {
			return nil
		}
		asked += h.asked
		errs = append(errs, h.err)
	}
	if asked == 0 {
		return nil
	}
	return errors.Join(errs...)
}

// reachable returns the address at which a listener is asked that is open on an
// address: one that is open on all of them, on loopback.
func reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip.To4() == nil {
			host = "::1"
		}
	}
	return net.JoinHostPort(host, port)
}
