package table

import (
	"encoding/binary"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

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

// maxPortNameLen is the length in bytes of the longest name of a port: its label begins with an
// underscore.
const maxPortNameLen = 62

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
