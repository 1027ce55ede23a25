package table

import (
	"encoding/binary"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A port is a port of a Service. In a headless Service, perhaps only some endpoints have the port.
type port struct {
	name     string // in lower case; empty for the unnamed port
	number   uint16
	protocol protocol
	// addresses are the addresses that have the port. partial is true if only some addresses of the host have the port,
	// because not all endpoints of a headless Service have it.
	addresses
	partial bool
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

// maxPortNameLen is the length in bytes of the longest name of a port. Together with an underscore, the name must fit
// in a label of 63 bytes.
const maxPortNameLen = 62

// somePorts is a bit in the byte of a port's protocol. It is set if the addresses of the port are stored.
const somePorts = 0x80

// appendPort appends a port to the field with the ports of a record. It appends the protocol, the number and
// the name. If not all endpoints of the Service have the port, it also appends the addresses that have it.
func appendPort(dst []byte, p *port) []byte {
	first := byte(p.protocol)
	if p.partial {
		first |= somePorts
	}
	dst = appendField(binary.BigEndian.AppendUint16(append(dst, first), p.number), p.name)
	if p.partial {
		dst = appendField(appendField(dst, p.V4), p.V6)
	}
	return dst
}

// eachPort decodes the ports in field, and yields them. The parameter host has the addresses of the Service. If
// field has no addresses for a port, all addresses of the Service have the port.
func eachPort(field []byte, host *addresses, yield func(port) bool) {
	for rest := field; len(rest) > 0; {
		p := port{protocol: protocol(rest[0] &^ somePorts), partial: rest[0]&somePorts != 0, addresses: *host}
		p.number = binary.BigEndian.Uint16(rest[1:])
		var name []byte
		name, rest = cutField(rest[1+2:])
		p.name = viewString(name)
		if p.partial {
			p.V4, rest = cutField(rest)
			p.V6, rest = cutField(rest)
			p.near = [2]uint32{}
		}
		if !yield(p) {
			return
		}
	}
}

// hasName reports whether prefix is _name._protocol of the port.
func (p *port) hasName(prefix wire.Name) bool {
	name := prefix.FirstLabel()
	protocol := prefix.Parent().FirstLabel()
	return p.name != "" && name[0] == '_' && name[1:] == p.name &&
		protocol[0] == '_' && strings.EqualFold(protocol[1:], p.protocol.String())
}

// A Destination says where connections to one TCP port of an external host go.
type Destination struct {
	// Port is the port that clients connect to. If there are no Endpoints, the connections go to the port Target of the
	// host itself.
	Port, Target uint16
	// Endpoints are where the connections go, each as HOST:PORT. HOST is a hostname or an IP address.
	Endpoints []string
}

// appendDestination appends a destination to the field of a record: its port, target and endpoints.
func appendDestination(dst []byte, d *Destination) []byte {
	dst = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(dst, d.Port), d.Target)
	dst = binary.AppendUvarint(dst, uint64(len(d.Endpoints)))
	for _, endpoint := range d.Endpoints {
		dst = appendField(dst, endpoint)
	}
	return dst
}

// eachDestination yields the destinations in a field.
func eachDestination(field []byte, yield func(Destination) bool) {
	for rest := field; len(rest) > 0; {
		d := Destination{Port: binary.BigEndian.Uint16(rest), Target: binary.BigEndian.Uint16(rest[2:])}
		count, n := binary.Uvarint(rest[4:])
		rest = rest[4+n:]
		for range count {
			var endpoint []byte
			endpoint, rest = cutField(rest)
			d.Endpoints = append(d.Endpoints, string(endpoint))
		}
		if !yield(d) {
			return
		}
	}
}
