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
	"github.com/nametap/nametap/internal/listen"
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
	alive, err := leaseQuery.send(f)
	if err != nil || !alive {
		return false, err
	}
	if dropped, err := leaseNothing.send(f); err != nil || dropped {
		return false, errors.Join(err, fmt.Errorf("a firewall drops packets to %s, so the lease of the capture rules is not known", f.Loopback()))
	}
	return true, nil
}

// A lease makes requests about the leases of both families. The zero value is ready for use. Its methods are
// safe for concurrent use.
type lease struct {
	mu      sync.Mutex
	renewed map[family.Family]time.Time // the last renewals
}

// renew renews the lease of a family for [LeaseTime]. restarted is true if the lease had ended, or may have been another
// process's, or if its rules are gone. renew does nothing if there are no rules with a lease.
func (l *lease) renew(f family.Family) (restarted bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept, _ := leaseQuery.send(f) // the renewal would have the same error
	done, err := leaseRenewal.send(f)
	_, known := l.renewed[f]
	if err != nil || !done {
		delete(l.renewed, f)
		return known && err == nil, err
	}
	if l.renewed == nil {
		l.renewed = make(map[family.Family]time.Time)
	}
	l.renewed[f] = time.Now()
	return !known || !kept, nil
}

// forget forgets the renewals: for new rules, the kernel makes a new list.
func (l *lease) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.renewed)
}

// end ends the lease of a family at once. done is true if there are rules with a lease.
func (l *lease) end(f family.Family) (done bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.renewed, f)
	if done, err = leaseEnd.send(f); !done {
		return false, err
	}
	dropped, err := leaseNothing.send(f) // by a firewall, which may have dropped the request, too
	return !dropped, err
}

// alive reports whether this process has renewed the lease of a family in the last [LeaseTime].
func (l *lease) alive(f family.Family) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	renewed, ok := l.renewed[f]
	return ok && time.Since(renewed) < LeaseTime
}

// send sends a request, and reports whether a rule has carried it out. If this host does not have the family, there is
// no such rule.
func (r leaseRequest) send(f family.Family) (done bool, err error) {
	socket, err := unix.Socket(int(f.Number()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = unix.Sendto(socket, nil, 0, loopbackPort(f, uint16(r)))
		_ = unix.Close(socket) // nothing was written that could be lost
		done = errors.Is(err, unix.EPERM)
	}
	if done || err == nil || listen.NoRoute(err) {
		return done, nil
	}
	return false, fmt.Errorf("sending a request about the lease of the capture rules to %s: %w", f.Loopback(), err)
}

// loopbackPort returns the socket address of a UDP port of loopback.
func loopbackPort(f family.Family, port uint16) unix.Sockaddr {
	if f == family.IPv4 {
		return &unix.SockaddrInet4{Port: int(port), Addr: f.Loopback().As4()}
	}
	return &unix.SockaddrInet6{Port: int(port), Addr: f.Loopback().As16()}
}
