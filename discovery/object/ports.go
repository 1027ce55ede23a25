package object

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unique"
)

// A Port is a port of a Service, or of endpoints.
type Port struct {
	Name     string // a DNS label; empty for the unnamed port
	Number   uint16
	Protocol string // TCP, UDP or SCTP
}

// Ports is a list of ports in a form that needs little memory: equal lists share their memory, and most Services have
// one of a few lists. Use == to compare two lists. The zero value has no ports.
type Ports struct{ text unique.Handle[string] }

// NewPorts returns the list of ports. The result does not depend on the order of list, and has each port once.
func NewPorts(list []Port) Ports {
	if len(list) == 0 {
		return Ports{}
	}
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Number, b.Number), cmp.Compare(a.Protocol, b.Protocol))
	})
	var text strings.Builder
	for _, p := range slices.Compact(list) {
		fmt.Fprintf(&text, "%s %d %s\n", p.Name, p.Number, p.Protocol)
	}
	return Ports{unique.Make(text.String())}
}

// Len returns the number of ports.
func (p Ports) Len() int {
	if p == (Ports{}) {
		return 0
	}
	return strings.Count(p.text.Value(), "\n")
}

// Size returns how many bytes the ports have in a table, at most, without addresses.
func (p Ports) Size() int {
	if p == (Ports{}) {
		return 0
	}
	return len(p.text.Value()) + 4*p.Len()
}

// List returns the ports, sorted by name, number and protocol.
func (p Ports) List() []Port {
	if p == (Ports{}) {
		return nil
	}
	var list []Port
	for line := range strings.Lines(p.text.Value()) {
		name, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		number, protocol, _ := strings.Cut(rest, " ")
		n, _ := strconv.ParseUint(number, 10, 16) // NewPorts has written it
		list = append(list, Port{Name: name, Number: uint16(n), Protocol: protocol})
	}
	return list
}
