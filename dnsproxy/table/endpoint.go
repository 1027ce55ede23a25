package table

import (
	"net/netip"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// maxDashed is the length in bytes of the longest label of an endpoint, an IPv6 address.
// minDashes is the number of dashes that every such label has.
const (
	maxDashed = 39
	minDashes = 2
)

// appendDashed appends the label of an endpoint with a packed address to dst, after its length:
// the address with dashes. As in CoreDNS, a label that would end in a dash ends in 0, which is
// the same address: 2001-db8--0.
func appendDashed(dst, packed []byte) []byte {
	start := len(dst)
	dst = append(dst, 0)
	addr, _ := netip.AddrFromSlice(packed)
	dst = addr.AppendTo(dst)
	label := dst[start+1:]
	for i, c := range label {
		if c == '.' || c == ':' {
			label[i] = '-'
		}
	}
	if label[len(label)-1] == '-' {
		dst = append(dst, '0')
	}
	dst[start] = byte(len(dst) - start - 1) //nolint:gosec // at most maxDashed
	return dst
}

// parseDashed returns the address of an endpoint's label. It reports false for a label that
// appendDashed does not write.
func parseDashed(label string, s *Scratch) (netip.Addr, bool) {
	dashes := strings.Count(label, "-")
	separator := byte(':')
	const in4, in6 = 3, 7 // separators in an address without ::
	switch shortened := strings.Contains(label, "--"); {
	case len(label) > maxDashed:
		return netip.Addr{}, false
	case dashes == in4 && !shortened:
		separator = '.'
	case dashes != in6 && !shortened:
		return netip.Addr{}, false
	}
	text := s.name[:len(label)] // not an array here, which ParseAddr would have allocated
	for i, c := range []byte(label) {
		switch {
		case c == '-':
			c = separator
		case (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			return netip.Addr{}, false
		}
		text[i] = c
	}
	addr, err := netip.ParseAddr(viewString(text))
	if err != nil {
		return netip.Addr{}, false
	}
	var buf [1 + maxDashed + 1]byte
	packed := addr.As16()
	written := appendDashed(buf[:0], packed[16-addr.BitLen()/8:])
	return addr, string(written[1:]) == label
}

// endpoint makes m the match of the endpoint of a headless Service that has name: a label with its
// address, before the FQDN of the Service or, if m.Short is set, before a short name. An endpoint
// with the host name of a pod has only that name. It reports false if there is none.
func (t *Table) endpoint(m *Match, name wire.Name, s *Scratch) bool {
	parent := name.Parent()
	if t.headless == 0 || parent == wire.Root {
		return false
	}
	addr, ok := parseDashed(name.FirstLabel(), s)
	if !ok {
		return false
	}
	m.Rule, m.Prefix = RuleEndpoint, name[:len(name)-len(parent)]
	return t.findWhole(m, parent, s) && m.Host.headless() && t.narrow(&m.Host, addr)
}

// narrow leaves a headless Service only the address of one endpoint. It reports false if no
// endpoint without a host name has that address.
func (t *Table) narrow(h *Host, addr netip.Addr) bool {
	bytes := addr.As16()
	one := h.find(bytes[len(bytes)-addr.BitLen()/8:])
	if one == nil || t.hasPod(h.Name, one) {
		return false
	}
	if h.V4, h.V6, h.near = nil, nil, [2]uint32{}; addr.Is6() {
		h.V6 = one
	} else {
		h.V4 = one
	}
	return true
}

// hasPod reports whether a pod of a headless Service has a packed address and a host name.
func (t *Table) hasPod(service wire.Name, packed []byte) bool {
	found := false
	t.pods(service, packed, func(Host) bool {
		found = true
		return false
	})
	return found
}

// mayBePod reports whether the host may be a pod of a headless Service: below the domain of the
// cluster's Services, its name has one label more than a Service.
func (h *Host) mayBePod(c *Cluster) bool {
	if !h.Kubernetes() || h.headless() || h.isAlias() || h.wildcard() {
		return false
	}
	head, local := h.Name.CutSuffix(c.services)
	return !local || head.Parent() != wire.Root && head.Parent().Parent() != wire.Root
}

// podOf reports whether the host is a pod of a headless Service.
func (h *Host) podOf(service wire.Name) bool {
	near, far := h.servicesOfPod()
	return h.Kubernetes() && !h.headless() && (near == service || far == service && far != wire.Root)
}

// servicesOfPod returns the names of the Services that the host may be a pod of: HOST.SERVICE or,
// outside of the cluster domain, HOST.CLUSTER.SERVICE, as of a ServiceImport.
func (h *Host) servicesOfPod() (near, far wire.Name) {
	if near = h.Name.Parent(); near != wire.Root && h.flags&flagLocal == 0 {
		far = near.Parent()
	}
	return near, far
}
