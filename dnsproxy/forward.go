package dnsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"
)

// attemptTimeout bounds how long one server may take before the next is asked;
// what one server loses or delays then costs a second, not the whole query.
const attemptTimeout = time.Second

var (
	errNoUpstream   = errors.New("no nameserver to forward to: resolv.conf names none and no upstream is set")
	errTooManyQuery = errors.New("too many queries are in flight")
	errOtherReply   = errors.New("the reply is to another question")
)

// A forwarder asks nameservers what is not the table's. Its methods may be
// called from any goroutine.
type forwarder struct {
	timeout time.Duration // of one query, over all servers
	slots   chan struct{} // one for every query that may be in flight or held
	metrics *metrics
}

func newForwarder(timeout time.Duration, maxInflight int, m *metrics) *forwarder {
	return &forwarder{timeout: timeout, slots: make(chan struct{}, maxInflight), metrics: m}
}

// acquire takes a slot, unless all are taken; release gives it back.
func (f *forwarder) acquire() bool {
	select {
	case f.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

func (f *forwarder) release() { <-f.slots }

// exchange returns the first usable reply (NOERROR or NXDOMAIN) to req, asking
// the servers in turn until one comes or the time is up. A server that fails
// says so for this query: it is not asked again. If every server fails the reply
// is the first failure, and only without any reply is there an error.
//
// The reply has req's ID; req is not changed.
func (f *forwarder) exchange(ctx context.Context, req *dns.Msg, servers []netip.AddrPort) (*dns.Msg, error) {
	if len(servers) == 0 {
		return nil, errNoUpstream
	}
	if !f.acquire() {
		return nil, errTooManyQuery
	}
	defer f.release()
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()

	var failure *dns.Msg
	errs := make([]error, len(servers))  // the last of each server
	failed := make([]bool, len(servers)) // for this query, for good
	for left := len(servers); left > 0 && ctx.Err() == nil; {
		for i, server := range servers {
			if failed[i] || ctx.Err() != nil {
				continue
			}
			resp, err := f.attempt(ctx, req, server)
			switch {
			case err != nil:
				errs[i] = fmt.Errorf("%s: %w", server, err)
				// What was lost or late may come next time; an unreachable server
				// fails at once, for as long as it is gone.
				failed[i] = !isTimeout(err)
			case usable(resp):
				return resp, nil
			default:
				failed[i] = true
				failure = cmp.Or(failure, resp)
			}
			if failed[i] {
				left--
			}
		}
	}
	if failure != nil {
		return failure, nil
	}
	return nil, fmt.Errorf("no nameserver answered: %w", cmp.Or(errors.Join(errs...), ctx.Err()))
}

// usable reports whether resp is an answer and not a server's failure to give one.
func usable(resp *dns.Msg) bool {
	return resp.Rcode == dns.RcodeSuccess || resp.Rcode == dns.RcodeNameError
}

// attempt asks one server, over UDP and, if the reply was cut, over TCP.
func (f *forwarder) attempt(ctx context.Context, req *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	query := req.Copy()
	query.Id = dns.Id()

	f.metrics.upstreamRequests.Inc()
	start := time.Now()
	resp, err := f.roundTrip(ctx, "udp", query, server)
	if err == nil && resp.Truncated {
		if whole, tcpErr := f.roundTrip(ctx, "tcp", query, server); tcpErr == nil {
			resp = whole
		}
		// Without TCP the cut reply is all there is, and says that it is cut.
	}
	if err != nil {
		f.metrics.upstreamFailures.Inc()
		return nil, err
	}
	f.metrics.upstreamDuration.Observe(time.Since(start).Seconds())
	resp.Id = req.Id
	return resp, nil
}

// roundTrip sends query from a fresh socket, so from a fresh random port, and
// returns the reply to it. Over UDP whatever else arrives is passed over until
// the deadline: it may be late, or forged (RFC 5452, section 9.1).
func (f *forwarder) roundTrip(ctx context.Context, network string, query *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	// Packed and parsed here, not by exchange, which would want the key of a signed
	// message (TSIG): signatures are between the client and the server.
	packet, err := query.Pack()
	if err != nil {
		return nil, err
	}
	// The largest buffer there is: a server may send more than the client asked
	// for, and what we got we pass on, cut to size for the client.
	exchange := dns.Conn{Conn: conn, UDPSize: dns.MaxMsgSize}
	if _, err := exchange.Write(packet); err != nil {
		return nil, err
	}
	for {
		packet, err := exchange.ReadMsgHeader(nil)
		if err != nil && !errors.Is(err, dns.ErrShortRead) {
			return nil, err
		}
		resp := new(dns.Msg)
		err = resp.Unpack(packet)
		switch {
		// Some servers cut within a record.
		case (err == nil || resp.Truncated) && isReply(resp, query):
			return resp, nil
		case network != "udp":
			return nil, errors.Join(errOtherReply, err)
		}
	}
}

// isReply reports whether resp answers query. Nameservers return the question as
// it came, in its case; one that does not is not to be trusted. Only a failure,
// and the reply to an UPDATE (RFC 2136, section 3.8), may come as a bare header.
func isReply(resp, query *dns.Msg) bool {
	if !resp.Response || resp.Id != query.Id {
		return false
	}
	if len(resp.Question) == 0 && (!usable(resp) || query.Opcode != dns.OpcodeQuery) {
		return true
	}
	return slices.Equal(resp.Question, query.Question)
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}
