package table

import "encoding/binary"

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
