package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// LeaseTime is how long the rules with a lease match after the last [Capture.Renew].
const LeaseTime = 2 * time.Second

// leaseChain is the chain of table raw that carries out requests about the lease.
const leaseChain = ownPrefix + "LEASE"

// A leaseRequest is a UDP port. A datagram to this port of loopback makes the request. The rules of [leaseChain]
// carry out the request and drop the datagram, so sending it fails with EPERM. Without these rules, the datagram
// goes to a port on which no program listens.
type leaseRequest uint16

// The requests.
const (
	leaseRenewal leaseRequest = 1 + iota // sent by the agent: the rules match from now on
	leaseQuery                           // sent by any user: dropped if the rules match now
	leaseEnd                             // sent by the agent: the rules match no longer
	leaseNothing                         // matches no rule: if it is dropped, a firewall drops all requests
)

// leaseName returns the name of the list of match recent that holds the lease of a family. The mask of [recent]
// makes all addresses equal, so the list has at most one entry: the time of the last renewal.
func leaseName(f family.Family) string { return ownPrefix + strings.ToUpper(f.String()) }

// recent returns a match for a rule: iptables' match recent with a command for the list that holds the lease of a
// family.
func recent(f family.Family, command string) string {
	every := netip.PrefixFrom(f.Loopback(), 0).Masked().Addr()
	return fmt.Sprintf("-m recent %s --name %s --mask %s --rsource", command, leaseName(f), every)
}

// leaseAlive is the command of match recent that matches if the lease was renewed in the last [LeaseTime].
var leaseAlive = fmt.Sprintf("--rcheck --seconds %d", LeaseTime/time.Second) //nolint:gochecknoglobals // a constant

// Leased reports whether the rules of a family have a lease with time left.
func Leased(f family.Family) (bool, error) {
	var l lease
	defer l.close()
	alive, err := l.request(f, leaseQuery)
	if err != nil || !alive {
		return false, err
	}
	if dropped, err := l.request(f, leaseNothing); err != nil || dropped {
		return false, errors.Join(err, fmt.Errorf("a firewall drops packets to %s, so the lease of the capture rules is not known", f.Loopback()))
	}
	return true, nil
}

// A lease makes requests about the leases of both families. The zero value is ready for use. Its methods are
// safe for concurrent use.
type lease struct {
	mu      sync.Mutex
	sockets map[family.Family]int       // opened by the first request, closed after an error
	renewed map[family.Family]time.Time // the last renewals
}

// renew renews the lease of a family for [LeaseTime]. restarted is true if the lease may have ended before this
// renewal. renew does nothing if there are no rules with a lease.
func (l *lease) renew(f family.Family) (restarted bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	done, err := l.request(f, leaseRenewal)
	if err != nil || !done {
		return false, err
	}
	restarted = !l.aliveLocked(f)
	if l.renewed == nil {
		l.renewed = make(map[family.Family]time.Time)
	}
	l.renewed[f] = time.Now()
	return restarted, nil
}

// end ends the lease of a family at once. It is no error if there is no lease.
func (l *lease) end(f family.Family) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.renewed, f)
	_, err := l.request(f, leaseEnd)
	return err
}

// alive reports whether this process has renewed the lease of a family in the last [LeaseTime].
func (l *lease) alive(f family.Family) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.aliveLocked(f)
}

func (l *lease) aliveLocked(f family.Family) bool {
	renewed, ok := l.renewed[f]
	return ok && time.Since(renewed) < LeaseTime
}

// request sends a request, and reports whether a rule has carried it out. If this host does not have the family,
// there is no such rule.
func (l *lease) request(f family.Family, r leaseRequest) (done bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("sending a request about the lease of the capture rules to %s: %w", f.Loopback(), err)
		}
	}()
	socket, ok := l.sockets[f]
	if !ok {
		socket, err = unix.Socket(int(f.Number()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if isAny(err, unix.EAFNOSUPPORT) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		if l.sockets == nil {
			l.sockets = make(map[family.Family]int)
		}
		l.sockets[f] = socket
	}
	err = unix.Sendto(socket, nil, 0, loopbackPort(f, uint16(r)))
	switch {
	case errors.Is(err, unix.EPERM):
		return true, nil
	case isAny(err, unix.ENETUNREACH, unix.EADDRNOTAVAIL, unix.EHOSTUNREACH):
		err = nil
	}
	if err != nil {
		l.closeSocket(f)
	}
	return false, err
}

// loopbackPort returns the socket address of a UDP port of loopback.
func loopbackPort(f family.Family, port uint16) unix.Sockaddr {
	if f == family.IPv4 {
		return &unix.SockaddrInet4{Port: int(port), Addr: f.Loopback().As4()}
	}
	return &unix.SockaddrInet6{Port: int(port), Addr: f.Loopback().As16()}
}

// close closes the sockets.
func (l *lease) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for f := range l.sockets {
		l.closeSocket(f)
	}
}

func (l *lease) closeSocket(f family.Family) {
	_ = unix.Close(l.sockets[f]) // nothing was written that could be lost
	delete(l.sockets, f)
}
