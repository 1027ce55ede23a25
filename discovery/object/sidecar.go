package object

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Sidecar holds the fields of an Istio Sidecar that are used. A Sidecar selects workloads, and limits the hosts
// that these workloads see.
type Sidecar struct {
	// Labels select workloads of the Sidecar's namespace. A Sidecar without labels is the namespace's
	// default Sidecar.
	Labels map[string]string
	// Egress has the visible hosts; nil means all.
	Egress []EgressListener
	// Created is the creationTimestamp; the zero time if there is none, as in most directories. Of several Sidecars
	// for a workload, the oldest counts.
	Created time.Time
}

// An EgressListener shows the hosts that one of Hosts selects and none of Hosts excludes. Several listeners with one
// port, which Istio does not permit, are one, and so are several HTTP proxies.
type EgressListener struct {
	Port  int // only hosts with this port are visible; AnyPort or ProxyPort for hosts with any port, or without one
	Hosts []EgressHost
}

// The ports of listeners that show hosts with any port.
const (
	AnyPort   = 0       // of the listener without a port
	ProxyPort = 1 << 16 // of HTTP proxies
)

// EgressHost selects one or several hosts, of one namespace or of all.
type EgressHost struct {
	Namespace string // "*" for all namespaces, "." for the workload's namespace
	Host      string // "*" for all, "*.suffix" for hosts with the suffix
	Excluded  bool   // the listener does not show these hosts, even if it also selects them
}

const anything = "*"

// ParseEgressHost parses "NAMESPACE/HOST" of a Sidecar. As in istiod, "~NAMESPACE/HOST" excludes hosts, "~/HOST" excludes
// them in all namespaces, and the case of letters counts.
func ParseEgressHost(text string) (EgressHost, error) {
	from, host, found := strings.Cut(text, "/")
	from, excluded := strings.CutPrefix(from, exportToNone)
	if excluded && from == "" {
		from = anything
	}
	if !found || host != anything && !IsHost(host) || from != anything && from != exportToPrivate && !IsLabel(from) {
		return EgressHost{}, fmt.Errorf(`want NAMESPACE/HOST, with a name, "." or "*" as the namespace, or "~" before it, got %q`, text)
	}
	return EgressHost{from, host, excluded}, nil
}

// Selects reports whether labels have all labels of a selector.
func Selects(selector, labels map[string]string) bool {
	for name, value := range selector {
		if got, ok := labels[name]; !ok || got != value {
			return false
		}
	}
	return true
}

// An Egress has the egress listeners of a Sidecar. The time that Shows takes does not depend on the number of hosts. A
// nil Egress shows all hosts.
type Egress struct {
	listeners map[int]listener // by port
	from      map[string]bool  // the namespaces of all EgressHosts
}

// A listener has the hosts that an EgressListener selects and excludes.
type listener struct{ selected, excluded hostsByNamespace }

// hostsByNamespace has hosts by the namespace of an EgressHost.
type hostsByNamespace map[string]*hostSet

// A hostSet has hosts of one namespace.
type hostSet struct {
	all             bool
	hosts, suffixes map[string]bool // a suffix begins with a dot
}

// NewEgress returns the hosts that a Sidecar shows.
func (s *Sidecar) NewEgress() *Egress {
	if s.Egress == nil {
		return nil
	}
	e := &Egress{map[int]listener{}, map[string]bool{}}
	for _, l := range s.Egress {
		if e.listeners[l.Port].selected == nil {
			e.listeners[l.Port] = listener{hostsByNamespace{}, hostsByNamespace{}}
		}
		for _, h := range l.Hosts {
			if e.from[h.Namespace] = true; h.Excluded {
				e.listeners[l.Port].excluded.add(h)
			} else {
				e.listeners[l.Port].selected.add(h)
			}
		}
	}
	return e
}

func (m hostsByNamespace) add(h EgressHost) {
	set := m[h.Namespace]
	if set == nil {
		set = &hostSet{hosts: map[string]bool{}, suffixes: map[string]bool{}}
		m[h.Namespace] = set
	}
	suffix, wild := strings.CutPrefix(h.Host, anything)
	switch {
	case h.Host == anything:
		set.all = true
	case wild:
		set.suffixes[suffix] = true
	default:
		set.hosts[h.Host] = true
	}
}

// has reports whether m has a host of a namespace. The parameter workload is the namespace of the workload.
func (m hostsByNamespace) has(workload, namespace, host string) bool {
	return m[anything].covers(host) || m[namespace].covers(host) || workload == namespace && m[exportToPrivate].covers(host)
}

// Shows reports whether a workload sees a host of a namespace that has ports. The host may be in any case. The
// parameter workload is the workload's namespace. It is the Sidecar's namespace unless the Sidecar
// is the default of all namespaces.
func (e *Egress) Shows(workload, namespace, host string, ports []uint16) bool {
	if e == nil || e.shows(AnyPort, workload, namespace, host) || e.shows(ProxyPort, workload, namespace, host) {
		return true
	}
	return slices.ContainsFunc(ports, func(port uint16) bool { return e.shows(int(port), workload, namespace, host) })
}

// shows reports whether the listener of a port shows a host.
func (e *Egress) shows(port int, workload, namespace, host string) bool {
	l := e.listeners[port]
	return l.selected.has(workload, namespace, host) && !l.excluded.has(workload, namespace, host)
}

// covers reports whether a host, which may be a wildcard itself, is in the set, or has a suffix in it.
func (s *hostSet) covers(host string) bool {
	switch {
	case s == nil:
		return false
	case s.all:
		return true
	}
	if s.hosts[host] {
		return true
	}
	for rest := host; len(s.suffixes) > 0; {
		dot := strings.IndexByte(rest, '.')
		if dot < 0 {
			return false
		}
		if rest = rest[dot:]; s.suffixes[rest] {
			return true
		}
		rest = rest[1:]
	}
	return false
}

// FromOwn reports whether e shows or hides hosts because they are in the workload's own namespace.
func (e *Egress) FromOwn() bool { return e != nil && e.from[exportToPrivate] }

// FromAny reports whether e may show hosts of one of the given namespaces to workloads of any namespace. The namespaces
// are the keys of the map.
func FromAny[T any](e *Egress, namespaces map[string]T) bool {
	if e == nil || e.from[anything] {
		return len(namespaces) > 0
	}
	for namespace := range namespaces {
		if e.from[namespace] {
			return true
		}
	}
	return false
}
