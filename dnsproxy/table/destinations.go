package table

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Destination is where connections to a TCP port of an external host lead.
type Destination struct {
	// Port is the port that clients connect to, and Target the one at the host itself.
	Port, Target uint16
	// Endpoints are where the connections lead, as HOST:PORT, where HOST is a hostname or an IP
	// address. Without any they lead to the host itself.
	Endpoints []string
}

// Destinations yields where connections to an external host lead, one for each of its ports. It
// yields none if its ports are not known.
func (h *Host) Destinations(yield func(Destination) bool) {
	if h.hasDestinations() {
		field, _ := cutField(h.afterTexts()) // an alias has none
		eachDestination(field, yield)
	}
}

// hasDestinations reports whether the ports of an external host are known.
func (h *Host) hasDestinations() bool { return h.flags&flagPorts != 0 && !h.Kubernetes() }

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

// destinations returns the encoded destinations of a candidate. It records in s what is wrong with
// destinations that it leaves out.
func (b *builder) destinations(s *shard) []byte {
	start := len(b.encoded)
	for i := range b.info.destinations {
		info := &b.info.destinations[i]
		d, ok := b.destination(s, info)
		eachDestination(b.encoded[start:], func(earlier Destination) bool {
			if ok && earlier.Port == d.Port {
				s.skip(b.info.key, fmt.Sprintf("destination of port %d: it is there twice", info.port))
				ok = false
			}
			return ok
		})
		if ok {
			b.encoded = appendDestination(b.encoded, &d)
		}
	}
	return b.encoded[start:len(b.encoded):len(b.encoded)]
}

// destination checks a destination. One with endpoints of which none is valid is not valid.
func (b *builder) destination(s *shard, info *destinationInfo) (d Destination, ok bool) {
	skip := func(format string, args ...any) {
		s.skip(b.info.key, fmt.Sprintf("destination of port %d: ", info.port)+fmt.Sprintf(format, args...))
	}
	switch {
	case info.port == 0 || info.port > math.MaxUint16:
		skip("the port is not between 1 and %d", math.MaxUint16)
		return d, false
	case info.target > math.MaxUint16:
		skip("target %d is not between 1 and %d", info.target, math.MaxUint16)
		return d, false
	case info.target == 0:
		info.target = info.port
	}
	d.Port, d.Target = uint16(info.port), uint16(info.target)
	for _, endpoint := range info.endpoints {
		if err := checkEndpoint(endpoint); err != nil {
			skip("endpoint %q: %v", endpoint, err)
			continue
		}
		if !slices.Contains(d.Endpoints, endpoint) {
			d.Endpoints = append(d.Endpoints, endpoint)
		}
	}
	return d, len(d.Endpoints) > 0 || len(info.endpoints) == 0
}

// checkEndpoint returns an error if text is not an endpoint of a Destination.
func checkEndpoint(text string) error {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return errors.New("want HOST:PORT")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("port %q is not between 1 and %d", port, math.MaxUint16)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return errors.New("the address has a zone")
		}
		return nil
	}
	name, err := wire.ParseHostname(host)
	switch {
	case err != nil:
		return fmt.Errorf("neither an IP address nor a hostname: %w", err)
	case name.Special():
		return wire.ErrSpecial
	}
	return nil
}
