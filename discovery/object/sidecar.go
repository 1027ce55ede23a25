package object

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Sidecar holds the fields of an Istio Sidecar that are used: it limits the hosts that the
// workloads it selects see.
type Sidecar struct {
	// Labels select workloads of the Sidecar's namespace; without any it is the default of the
	// namespace.
	Labels map[string]string
	// Egress are the visible hosts; nil means all.
	Egress []EgressHost
	// Created is when the object was created; the zero time in a directory. The oldest of several
	// Sidecars for a workload counts.
	Created time.Time
}

// EgressHost is a host, or several, of one namespace or of all.
type EgressHost struct {
	Namespace string // "*" for all, "." for that of the workload
	Host      string // in lower case; "*" for all, "*.suffix" for those that end so
}

const anything = "*"

// ParseEgressHost parses "NAMESPACE/HOST" of a Sidecar. ok is false for the namespace "~", which stands
// for none.
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

// Selects reports whether labels have all those of a selector.
func Selects(selector, labels map[string]string) bool {
	for name, value := range selector {
		if got, ok := labels[name]; !ok || got != value {
			return false
		}
	}
	return true
}

// Shows reports whether a workload sees a host of a namespace. The host may be in any case. workload is
// the workload's namespace, which is that of the Sidecar unless it is the default of all namespaces.
func (s *Sidecar) Shows(workload, namespace, host string) bool {
	if s.Egress == nil {
		return true
	}
	for _, e := range s.Egress {
		from := e.Namespace
		if from == exportToPrivate {
			from = workload
		}
		if (e.Namespace == anything || from == namespace) && (e.Host == anything || e.covers(strings.ToLower(host))) {
			return true
		}
	}
	return false
}

// FromOwn reports whether some hosts are shown because they are of the workload's own namespace.
func (s *Sidecar) FromOwn() bool {
	return slices.ContainsFunc(s.Egress, func(e EgressHost) bool { return e.Namespace == exportToPrivate })
}

// FromAnywhere reports whether the hosts may be of any namespace.
func (e EgressHost) FromAnywhere() bool { return e.Namespace == anything }

// covers reports whether a host, which may be a wildcard itself, is e's, or below it.
func (e EgressHost) covers(host string) bool {
	suffix, wild := strings.CutPrefix(e.Host, anything)
	return e.Host == host || wild && strings.HasSuffix(host, suffix)
}
