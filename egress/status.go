package egress

import (
	"fmt"
	"net/netip"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Status is the state of a [Server].
type Status struct {
	// Listeners are the addresses that the server listens on.
	Listeners []netip.AddrPort `json:"listeners"`
	// Open is the number of open connections, and Max their limit.
	Open int64 `json:"open"`
	Max  int64 `json:"max"`
	// Hosts are the hosts to which clients connected, by name: the last [maxHosts] names.
	Hosts []HostStatus `json:"hosts,omitempty"`
	// Refused has the number of refusals and the last refusal, for each reason.
	Refused []RefusalStatus `json:"refused,omitempty"`
}

// A HostStatus is what a [Server] knows of a name to which clients connected.
type HostStatus struct {
	// Host is the host of the table. Name is the name that the client wanted: it differs from Host only if Host is a
	// wildcard.
	Host string `json:"host"`
	Name string `json:"name"`
	// VIP is the address to which a client connected last, and Address the address to which the server connected that
	// client.
	VIP     netip.AddrPort `json:"vip"`
	Address netip.AddrPort `json:"address"`
	// PortsUnknown is true if the table does not have the ports of the host. Then the server dialled the same port
	// that the client connected to.
	PortsUnknown bool `json:"portsUnknown,omitempty"`
	// Total is the number of connections so far, and Open how many of them are open.
	Open  int64 `json:"open"`
	Total int64 `json:"total"`
	// Sent and Received are the bytes to the host and from it.
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
}

// A RefusalStatus has the number of refusals for a reason, and the time and the error of the last one.
type RefusalStatus struct {
	Reason Reason    `json:"reason"`
	Count  int64     `json:"count"`
	Last   time.Time `json:"last"`
	Error  string    `json:"error"`
}

// maxHosts is how many names are counted at a time. Clients choose the names below a wildcard, so there may be any
// number of them.
const maxHosts = 1024

// counts are the counts of one name.
type counts struct {
	all                  *hostCounts
	open, sent, received atomic.Int64

	HostStatus // guarded by the mutex of the hostCounts; without Open, Sent and Received
}

// hostCounts counts by name.
type hostCounts struct {
	sent, received atomic.Int64 // bytes to all hosts, and from them

	mu     sync.Mutex
	byName *simplelru.LRU[wire.Name, *counts]
}

// countOpen counts an open connection to name, and returns the counts of name. The client connected to vip, and the
// server to address.
func (h *hostCounts) countOpen(name wire.Name, host *vipHost, vip, address netip.AddrPort) *counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, known := h.byName.Get(name)
	if !known {
		c = &counts{all: h, HostStatus: HostStatus{Name: hostText(name)}}
		h.byName.Add(name, c)
	}
	c.Total++
	c.open.Add(1)
	c.Host, c.VIP, c.Address, c.PortsUnknown = hostText(host.name), vip, address, !host.known
	return c
}

// status returns the counts by name.
func (h *hostCounts) status() (all []HostStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.byName.Values() {
		status := c.HostStatus
		status.Open, status.Sent, status.Received = c.open.Load(), c.sent.Load(), c.received.Load()
		all = append(all, status)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all
}

// metrics count what a server carries and refuses.
type metrics struct {
	open     atomic.Int64 // connections
	max      int64        // limit of open
	hosts    hostCounts
	refusals refusals

	connections, idle prometheus.Counter
}

// newMetrics returns metrics with a limit of open connections. If registerer is not nil, they are registered there.
func newMetrics(limit int64, registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	refused := factory.NewCounterVec(prometheus.CounterOpts{
		Name: "nametap_egress_refusals_total", Help: "Connections to VIPs that were refused, by reason.",
	}, []string{"reason"})
	for _, reason := range allReasons() {
		refused.WithLabelValues(string(reason))
	}
	m := &metrics{
		max: limit, refusals: refusals{byReason: map[Reason]*reasonCount{}, total: refused},
		connections: factory.NewCounter(prometheus.CounterOpts{
			Name: "nametap_egress_connections_total", Help: "Connections to VIPs that were carried to a host.",
		}),
		idle: factory.NewCounter(prometheus.CounterOpts{
			Name: "nametap_egress_idle_closed_total", Help: "Connections to VIPs that were closed because they were idle.",
		}),
	}
	m.hosts.byName, _ = simplelru.NewLRU[wire.Name, *counts](maxHosts, nil) // fails only for a size below 1
	factory.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "nametap_egress_open_connections", Help: "Connections to VIPs that are open.",
	}, func() float64 { return float64(m.open.Load()) })
	factory.NewGauge(prometheus.GaugeOpts{
		Name: "nametap_egress_max_connections", Help: "Limit of open connections to VIPs.",
	}).Set(float64(limit))
	for direction, bytes := range map[string]*atomic.Int64{"sent": &m.hosts.sent, "received": &m.hosts.received} {
		factory.NewCounterFunc(prometheus.CounterOpts{
			Name: "nametap_egress_bytes_total", Help: "Bytes that were carried, by direction.", ConstLabels: prometheus.Labels{"direction": direction},
		}, func() float64 { return float64(bytes.Load()) })
	}
	return m
}

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

	logged time.Time // when a refusal was logged last
}

// refusals counts refusals by reason.
type refusals struct {
	total *prometheus.CounterVec

	mu       sync.Mutex
	byReason map[Reason]*reasonCount
}

// add counts a refusal. It returns the number of refusals for the reason, or 0 if there was a log line less than
// refusalLogInterval ago.
func (r *refusals) add(reason Reason, err error) (logged int64) {
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
	if c.Last.Sub(c.logged) >= refusalLogInterval {
		logged, c.logged = c.Count, c.Last
	}
	return logged
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
