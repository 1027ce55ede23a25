package egress

import (
	"fmt"
	"sort"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A Reason says why a connection was not carried.
type Reason string

// The reasons of refusals.
const (
	ReasonLimit      Reason = "limit"       // too many connections, or too much memory in use for reading names
	ReasonDirect     Reason = "direct"      // the client connected to the listener itself, or its VIP cannot be found
	ReasonNoHost     Reason = "no_host"     // no host is known to have the VIP
	ReasonDenied     Reason = "denied"      // the guard's policy does not allow the name
	ReasonPort       Reason = "port"        // the host does not have the port, or the guard's policy does not allow it
	ReasonNoName     Reason = "no_name"     // the client said no name
	ReasonOtherName  Reason = "other_name"  // the client said a name, but no host of this name has the VIP
	ReasonProtocol   Reason = "protocol"    // the client had to say a name, but sent no valid TLS or HTTP/1
	ReasonSlow       Reason = "slow"        // the client said no name in time
	ReasonClosed     Reason = "closed"      // the client closed the connection before it said a name, or reset it before its host was connected
	ReasonResolution Reason = "resolution"  // no address of the name was found
	ReasonAddress    Reason = "address"     // all addresses of the name are refused
	ReasonConnect    Reason = "connect"     // no address accepts the connection
	ReasonDescriptor Reason = "descriptors" // the process has no descriptors left
	ReasonEnd        Reason = "end"         // the agent ends
)

// allReasons returns all reasons.
func allReasons() []Reason {
	return []Reason{
		ReasonLimit, ReasonDirect, ReasonNoHost, ReasonDenied, ReasonPort, ReasonNoName, ReasonOtherName, ReasonProtocol,
		ReasonSlow, ReasonClosed, ReasonResolution, ReasonAddress, ReasonConnect, ReasonDescriptor, ReasonEnd,
	}
}

// A refusal is the error of a connection that is not carried.
type refusal struct {
	reason Reason
	error
}

// Unwrap returns the error that caused the refusal.
func (r *refusal) Unwrap() error { return r.error }

// refuse returns a refusal.
func refuse(reason Reason, format string, args ...any) error {
	return &refusal{reason, fmt.Errorf(format, args...)}
}

// refusalLogInterval is the shortest time between two log lines for one reason.
const refusalLogInterval = time.Second

// A reasonCount counts the refusals for one reason.
type reasonCount struct {
	RefusalStatus

	logged   time.Time // when a refusal was logged last
	unlogged int       // the refusals since then
}

// refusals counts refusals by reason.
type refusals struct {
	total *prometheus.CounterVec

	mu       sync.Mutex
	byReason map[Reason]*reasonCount
}

// add counts a refusal. It returns how many refusals for the reason a log line has to report: none if there was a line less
// than refusalLogInterval ago.
func (r *refusals) add(reason Reason, err error) (unlogged int) {
	r.total.WithLabelValues(string(reason)).Inc()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.byReason[reason]
	if c == nil {
		c = &reasonCount{RefusalStatus: RefusalStatus{Reason: reason}}
		r.byReason[reason] = c
	}
	c.Count++
	c.Last, c.Error = time.Now(), err.Error()
	c.unlogged++
	if c.Last.Sub(c.logged) >= refusalLogInterval {
		unlogged, c.logged, c.unlogged = c.unlogged, c.Last, 0
	}
	return unlogged
}

// status returns the number of refusals and the last refusal for each reason, sorted by reason.
func (r *refusals) status() []RefusalStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []RefusalStatus
	for _, c := range r.byReason {
		all = append(all, c.RefusalStatus)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Reason < all[j].Reason })
	return all
}
