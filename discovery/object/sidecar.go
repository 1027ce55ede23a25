package object

import (
	"fmt"
	"strings"
	"time"
)

// Sidecar holds the fields of an Istio Sidecar that are used. A Sidecar selects workloads, and limits the hosts
// that these workloads see.
type Sidecar struct {
	// Labels select workloads of the Sidecar's namespace. A Sidecar without labels is the namespace's
	// default Sidecar.
	Labels map[string]string
	// Egress are the visible hosts; nil means all.
	Egress []EgressHost
	// Created is the creationTimestamp; the zero time if there is none, as in most directories. Of several Sidecars
	// for a workload, the oldest counts.
	Created time.Time
}

// EgressHost selects one or several hosts, of one namespace or of all.
type EgressHost struct {
	Namespace string // "*" for all namespaces, "." for the workload's namespace
	Host      string // in lower case; "*" for all, "*.suffix" for hosts with the suffix
}

const anything = "*"

// ParseEgressHost parses "NAMESPACE/HOST" of a Sidecar. ok is false for the namespace "~", which stands
// for no namespace.
func ParseEgressHost(text string) (h EgressHost, ok bool, err error) {
	from, host, found := strings.Cut(text, "/")
	host = strings.ToLower(host)
	switch {
	case !found || host != anything && !IsHost(host) || from != anything && from != exportToPrivate && from != exportToNone && !IsLabel(from):
		return h, false, fmt.Errorf(`want NAMESPACE/HOST, with a name, ".", "*" or "~" as the namespace, got %q`, text)
	case from == exportToNone:
		return h, false, nil
	}
	return EgressHost{from, host}, true, nil
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

// An Egress has the egress hosts of a Sidecar. The time that Shows takes does not depend on the number of hosts. A
// nil Egress shows all hosts.
type Egress struct {
	from map[string]*shown // by the namespace of an EgressHost
}

// shown are hosts of one namespace.
type shown struct {
	all             bool
	hosts, suffixes map[string]bool // a suffix begins with a dot
}

// NewEgress returns the hosts that a Sidecar shows.
func (s *Sidecar) NewEgress() *Egress {
	if s.Egress == nil {
		return nil
	}
	e := &Egress{from: map[string]*shown{}}
	for _, h := range s.Egress {
		of := e.from[h.Namespace]
		if of == nil {
			of = &shown{hosts: map[string]bool{}, suffixes: map[string]bool{}}
			e.from[h.Namespace] = of
		}
		suffix, wild := strings.CutPrefix(h.Host, anything)
		switch {
		case h.Host == anything:
			of.all = true
		case wild:
			of.suffixes[suffix] = true
		default:
			of.hosts[h.Host] = true
		}
	}
	return e
}

// Shows reports whether a workload sees a host of a namespace. The host may be in any case. The
// parameter workload is the workload's namespace. It is the Sidecar's namespace unless the Sidecar
// is the default of all namespaces.
func (e *Egress) Shows(workload, namespace, host string) bool {
	if e == nil {
		return true
	}
	return e.from[anything].covers(host) || e.from[namespace].covers(host) || workload == namespace && e.from[exportToPrivate].covers(host)
}

// covers reports whether a host, which may be a wildcard itself, is a shown host, or has a shown suffix.
func (s *shown) covers(host string) bool {
	switch {
	case s == nil:
		return false
	case s.all:
		return true
	}
	host = strings.ToLower(host)
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

// FromOwn reports whether e shows hosts because they are in the workload's own namespace.
func (e *Egress) FromOwn() bool { return e != nil && e.from[exportToPrivate] != nil }

// FromAny reports whether e may show hosts of one of the given namespaces to workloads of any namespace. The namespaces
// are the keys of the map.
func FromAny[T any](e *Egress, namespaces map[string]T) bool {
	switch {
	case e == nil || e.from[anything] != nil:
		return len(namespaces) > 0
	case len(namespaces) < len(e.from):
		for namespace := range namespaces {
			if e.from[namespace] != nil {
				return true
			}
		}
		return false
	}
	for namespace := range e.from {
		if _, found := namespaces[namespace]; found {
			return true
		}
	}
	return false
}
