package probe

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/iptables"
)

// A Refusal says whether the kernel refuses packets over a family to an address that no policy has.
type Refusal struct {
	Family family.Family  `json:"family"`
	To     netip.AddrPort `json:"to"`
	State  RefusalState   `json:"state"`
	Error  string         `json:"error,omitempty"` // of the state Unknown
}

// RefusalState is the state of a [Refusal].
type RefusalState string

// The states of a Refusal.
const (
	Refused  RefusalState = "refused"
	Passed   RefusalState = "not refused"
	NoRoute  RefusalState = "this host has no route" // so nothing leaves
	Untested RefusalState = "not known"
)

// Unlisted returns the address of a family to which [Guarded] sends packets. It is for documentation (RFC 5737, RFC 3849),
// and the port is that of the service discard.
func Unlisted(f family.Family) netip.AddrPort {
	if f == family.IPv4 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 1}), 9)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1}), 9)
}

// Guarded sends packets to [Unlisted], and reports whether the kernel of this host refuses them. It needs no capability. If the
// kernel does not refuse them, the first router discards them. Another host could refuse a connection, too; but that a UDP
// packet cannot be sent for lack of permission only rules of this host cause.
func Guarded(ctx context.Context, f family.Family) Refusal {
	found := Refusal{Family: f, To: Unlisted(f), State: Refused}
	dialer := net.Dialer{Timeout: Timeout, Control: SetHops(iptables.GuardHops)}
	conn, err := dialer.DialContext(ctx, "udp", found.To.String())
	if err == nil {
		_, err = conn.Write([]byte{0})
		_ = conn.Close()
	}
	switch {
	case listen.NoRoute(err):
		found.State = NoRoute
		return found
	case err != nil && !errors.Is(err, unix.EPERM):
		found.State, found.Error = Untested, err.Error()
		return found
	}
	permitted := err == nil
	conn, err = dialer.DialContext(ctx, "tcp", found.To.String())
	if err == nil {
		_ = conn.Close()
	}
	switch refused := errors.Is(err, unix.ECONNREFUSED); {
	case listen.OutOfDescriptors(err), ctx.Err() != nil && !refused:
		found.State, found.Error = Untested, err.Error()
	case permitted, !refused:
		found.State = Passed
	}
	return found
}
