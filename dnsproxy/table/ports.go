package table

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// maxPortNameLen is the length in bytes of the longest name of a port: its label begins with an
// underscore.
const maxPortNameLen = 62

// A protocol is the protocol of a port.
type protocol byte

// The protocols of ports.
const (
	protocolTCP protocol = iota
	protocolUDP
	protocolSCTP
)

// parseProtocol parses a protocol in any case; the default is TCP.
func parseProtocol(text string) (protocol, bool) {
	for _, p := range [...]protocol{protocolTCP, protocolUDP, protocolSCTP} {
		if strings.EqualFold(text, p.String()) {
			return p, true
		}
	}
	return protocolTCP, text == ""
}

// String returns the name of the protocol, as in Kubernetes.
func (p protocol) String() string {
	switch p {
	case protocolUDP:
		return "UDP"
	case protocolSCTP:
		return "SCTP"
	default:
		return "TCP"
	}
}

// A port is a port of a Service, or of endpoints of a headless one.
type port struct {
	name     string // in lower case; empty for the unnamed port
	number   uint16
	protocol protocol
	// v4 and v6 are the packed addresses that have the port: all of the host, unless some is set
	// because not all endpoints of a headless Service have it.
	v4, v6 []byte
	some   bool
	near   [2]uint32 // how many of v4 and v6 are near, as in [Host]
}

// maxPorts is the largest number of ports of a host. SRV queries compare a port with the ports
// before it.
const maxPorts = 100

// somePorts is the bit of a port's protocol that is set if its addresses follow.
const somePorts = 0x80

// appendPort appends a port to the field with the ports of a record: its protocol, number and
// name and, unless all endpoints of the Service have it, their addresses.
func appendPort(dst []byte, p *port) []byte {
	first := byte(p.protocol)
	if p.some {
		first |= somePorts
	}
	dst = appendField(binary.BigEndian.AppendUint16(append(dst, first), p.number), p.name)
	if p.some {
		dst = appendField(appendField(dst, p.v4), p.v6)
	}
	return dst
}

// hasPorts reports whether the ports of a Service are known.
func (h *Host) hasPorts() bool { return h.flags&flagPorts != 0 && h.Kubernetes() }

// ports yields the ports of a Service.
func (h *Host) ports(yield func(port) bool) {
	if h.hasPorts() {
		field, _ := cutField(h.afterTexts()) // an alias has no ports
		h.eachPort(field, yield)
	}
}

// eachPort yields the ports in a field of the host.
func (h *Host) eachPort(field []byte, yield func(port) bool) {
	for rest := field; len(rest) > 0; {
		p := port{protocol: protocol(rest[0] &^ somePorts), some: rest[0]&somePorts != 0, v4: h.V4, v6: h.V6, near: h.near}
		p.number = binary.BigEndian.Uint16(rest[1:])
		var name []byte
		name, rest = cutField(rest[1+2:])
		p.name = viewString(name)
		if p.some {
			p.v4, rest = cutField(rest)
			p.v6, rest = cutField(rest)
			p.near = [2]uint32{}
		}
		if !yield(p) {
			return
		}
	}
}

// ports returns the encoded ports of a candidate. It records in s what is wrong with ports that it
// leaves out.
func (b *builder) ports(s *shard, h *Host) []byte {
	start := len(b.encoded)
	if n := len(b.info.ports); n > maxPorts {
		s.skip(b.info.key, fmt.Sprintf("%d ports: only the first %d are used", n, maxPorts))
		b.info.ports = b.info.ports[:maxPorts]
	}
	for i := range b.info.ports {
		p, ok := b.port(s, h, &b.info.ports[i])
		h.eachPort(b.encoded[start:], func(earlier port) bool {
			if ok && earlier.name == p.name && earlier.number == p.number && earlier.protocol == p.protocol {
				s.skip(b.info.key, fmt.Sprintf("port %q: it is there twice", p.name))
				ok = false
			}
			return ok
		})
		if ok {
			b.encoded = appendPort(b.encoded, &p)
		}
	}
	return b.encoded[start:len(b.encoded):len(b.encoded)]
}

// port checks a port of a host. Its name is in the buffer of names, beyond its end.
func (b *builder) port(s *shard, h *Host, info *portInfo) (p port, ok bool) {
	skip := func(reason string) (port, bool) {
		s.skip(b.info.key, fmt.Sprintf("port %q: %s", info.name, reason))
		return port{}, false
	}
	if info.name != "" {
		names, _, err := wire.AppendHost(b.names, info.name)
		label := names[len(b.names):]
		if err != nil || int(label[0]) != len(label)-1 || len(label)-1 > maxPortNameLen || label[1] == '*' {
			return skip("want a label as its name")
		}
		p.name = viewString(label[1:])
	}
	if p.protocol, ok = parseProtocol(info.protocol); !ok {
		return skip(fmt.Sprintf("protocol %q is not TCP, UDP or SCTP", info.protocol))
	}
	if info.number == 0 || info.number > math.MaxUint16 {
		return skip(fmt.Sprintf("number %d is not between 1 and %d", info.number, math.MaxUint16))
	}
	p.number = uint16(info.number)
	if p.some = len(info.ips) > 0; p.some {
		b.addresses(s, info.ips)
		lacking := func(addr netip.Addr) bool { return !h.has(addr.AsSlice()) }
		p.v4, p.v6 = b.pack(slices.DeleteFunc(b.v4, lacking)), b.pack(slices.DeleteFunc(b.v6, lacking))
		if len(p.v4)+len(p.v6) == 0 {
			return port{}, false // of endpoints that the host does not have
		}
	}
	return p, true
}

// has reports whether an endpoint with a packed address has the port.
func (p *port) has(packed []byte) bool {
	h := Host{V4: p.v4, V6: p.v6, near: p.near}
	return h.has(packed)
}

// named reports whether prefix has the labels of the port, _name._protocol.
func (p *port) named(prefix wire.Name) bool {
	name := prefix.FirstLabel()
	protocol := prefix.Parent().FirstLabel()
	return p.name != "" && name[0] == '_' && name[1:] == p.name &&
		protocol[0] == '_' && strings.EqualFold(protocol[1:], p.protocol.String())
}

// port makes m the match of the port that has name: _name._protocol before the FQDN of a Service
// or, if m.Short is set, before a short name. It reports false if there is none.
func (t *Table) port(m *Match, name wire.Name, s *Scratch) (found bool) {
	rest := name.Parent()
	if t.ported == 0 || rest == wire.Root || rest.Parent() == wire.Root || rest[1] != '_' {
		return false
	}
	m.Rule, m.Prefix = RulePort, name[:len(name)-len(rest.Parent())]
	if !t.findWhole(m, rest.Parent(), s) {
		return false
	}
	for p := range m.Host.ports {
		found = found || p.named(m.Prefix)
	}
	return found
}

// hasPortBelow reports whether name is _protocol before the FQDN of a Service that has named
// ports of that protocol. Such a name exists without records.
func (t *Table) hasPortBelow(name wire.Name) bool {
	label := name.FirstLabel()
	if t.ported == 0 || len(label) < 2 || label[0] != '_' {
		return false
	}
	var m Match
	if !t.direct(&m, name.Parent(), new(Scratch)) || m.Rule != RuleExact && m.Rule != RuleShortName {
		return false
	}
	for p := range m.Host.ports {
		if p.name != "" && strings.EqualFold(label[1:], p.protocol.String()) {
			return true
		}
	}
	return false
}
