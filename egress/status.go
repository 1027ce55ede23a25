package egress

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

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
	// Hosts are the hosts to which clients connected, by name. There are at most [maxHosts] names. When a further
	// name is used, the name that was used longest ago is dropped. A name with open connections is dropped only if
	// all names have open connections.
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

	HostStatus           // guarded by the mutex of the hostCounts; without Open, Sent and Received
	used       time.Time // guarded, too
}

// hostCounts counts by name. The zero value is ready for use.
type hostCounts struct {
	sent, received atomic.Int64 // bytes to all hosts, and from them

	mu     sync.Mutex
	byName map[wire.Name]*counts
}

// countOpen counts an open connection to name, and returns the counts of name. The client connected to vip, and the
// server to address.
func (h *hostCounts) countOpen(name wire.Name, host *vipHost, vip, address netip.AddrPort) *counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.byName == nil {
		h.byName = map[wire.Name]*counts{}
	}
	c := h.byName[name]
	if c == nil {
		if len(h.byName) >= maxHosts {
			h.forgetLocked()
		}
		c = &counts{all: h, HostStatus: HostStatus{Name: hostText(name)}}
		h.byName[name] = c
	}
	c.Total++
	c.open.Add(1)
	c.Host, c.VIP, c.Address, c.PortsUnknown = hostText(host.name), vip, address, !host.known
	c.used = time.Now()
	return c
}

// forgetLocked forgets one name: see [Status].Hosts.
func (h *hostCounts) forgetLocked() {
	delete(h.byName, slices.MinFunc(slices.Collect(maps.Keys(h.byName)), func(a, b wire.Name) int {
		first, second := h.byName[a], h.byName[b]
		return cmp.Or(cmp.Compare(min(first.open.Load(), 1), min(second.open.Load(), 1)), first.used.Compare(second.used))
	}))
}

// status returns the counts by name.
func (h *hostCounts) status() (all []HostStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.byName {
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
