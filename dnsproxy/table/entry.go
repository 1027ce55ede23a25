package table

import (
	"fmt"
	"iter"
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// A fieldTag is the number of a field and its wire type, encoded as in a protobuf message.
type fieldTag uint64

// The fields of a NameTable and of the messages in it; api/nds.proto explains them. Fields with another number or
// wire type are ignored: they are from later versions of the messages.
const (
	bytesType  = fieldTag(protowire.BytesType)
	varintType = fieldTag(protowire.VarintType)

	fieldTable = 1<<3 | bytesType

	fieldMapKey   = 1<<3 | bytesType
	fieldMapValue = 2<<3 | bytesType

	fieldIPs          = 1<<3 | bytesType
	fieldRegistry     = 2<<3 | bytesType
	fieldShortname    = 3<<3 | bytesType
	fieldNamespace    = 4<<3 | bytesType
	fieldAlias        = 1001<<3 | bytesType
	fieldPorts        = 1002<<3 | bytesType
	fieldHeadless     = 1003<<3 | varintType
	fieldNear         = 1004<<3 | varintType
	fieldDestinations = 1005<<3 | bytesType

	fieldPortName     = 1<<3 | bytesType
	fieldPortNumber   = 2<<3 | varintType
	fieldPortProtocol = 3<<3 | bytesType
	fieldPortIPs      = 4<<3 | bytesType

	fieldDestinationPort      = 1<<3 | varintType
	fieldDestinationTarget    = 2<<3 | varintType
	fieldDestinationEndpoints = 3<<3 | bytesType
)

// fields reads the fields of a message in wire form, in their order.
type fields struct {
	message string // its name, for errors
	rest    []byte // what follows the current field

	// The current field. If the field is length-delimited, value is its content without the length. Otherwise value
	// is what follows the tag.
	tag   fieldTag
	value []byte

	err error // why the method next has reported false; nil at the end of the message
}

// next goes to the next field. It reports false after the last one, and after an error.
func (f *fields) next() bool {
	if len(f.rest) == 0 || f.err != nil {
		return false
	}
	number, kind, n := protowire.ConsumeTag(f.rest)
	if n >= 0 {
		f.tag, f.rest = fieldTag(protowire.EncodeTag(number, kind)), f.rest[n:]
		if kind == protowire.BytesType {
			f.value, n = protowire.ConsumeBytes(f.rest)
		} else if n = protowire.ConsumeFieldValue(number, kind, f.rest); n >= 0 {
			f.value = f.rest[:n]
		}
	}
	if n < 0 {
		f.err = protowire.ParseError(n)
		return false
	}
	f.rest = f.rest[n:]
	return true
}

// text returns the current field as a string, which shares the memory of the message. If it is not UTF-8, text sets
// err.
func (f *fields) text() string {
	if !utf8.Valid(f.value) {
		f.err = fmt.Errorf("field %d of a %s: %q is not UTF-8", f.tag>>3, f.message, f.value)
	}
	return viewString(f.value)
}

// varint returns the current field as a number.
func (f *fields) varint() uint64 {
	n, _ := protowire.ConsumeVarint(f.value)
	return n
}

// number returns the low 32 bits of the current field, which are its value if it is a uint32.
func (f *fields) number() uint64 { return f.varint() & math.MaxUint32 }

// wireEntries yields the entries of a NameTable in wire form. The entries share the memory of the message. If the
// message is malformed, the last thing that wireEntries yields is an error.
func wireEntries(table []byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		f := fields{rest: table}
		for f.next() {
			if f.tag == fieldTable && !yield(f.value, nil) {
				return
			}
		}
		if f.err != nil {
			yield(nil, f.err)
		}
	}
}

// A wireEntry is an entry of a NameTable: its key, and its NameInfo in wire form.
type wireEntry struct{ key, info []byte }

// parseWireEntry splits an entry of a NameTable into its key and its NameInfo. The result shares the memory of b.
func parseWireEntry(b []byte) (entry wireEntry, err error) {
	f := fields{rest: b}
	for f.next() {
		switch f.tag {
		case fieldMapKey:
			entry.key = f.value
		case fieldMapValue:
			entry.info = f.value
		}
	}
	return entry, f.err
}

// A nameInfo is a parsed NameInfo. Its strings share the memory of the push.
type nameInfo struct {
	ips          []string
	alias        string
	ports        []portInfo
	headless     bool
	near         uint64 // how many of ips are near; the near ones come first
	destinations []destinationInfo
	hostInfo
}

// A portInfo is a parsed Port. Its strings share the memory of the push.
type portInfo struct {
	name, protocol string
	number         uint64
	ips            []string
}

// A destinationInfo is a parsed Destination. Its strings share the memory of the push.
type destinationInfo struct {
	port, target uint64
	endpoints    []string
}

// parse parses a NameInfo in wire form into info. It reuses the memory of the lists in info.
func (info *nameInfo) parse(b []byte) error {
	*info = nameInfo{ips: info.ips[:0], ports: info.ports[:0], destinations: info.destinations[:0]}
	f := fields{message: "NameInfo", rest: b}
	for f.next() {
		switch f.tag {
		case fieldIPs:
			info.ips = append(info.ips, f.text())
		case fieldRegistry:
			info.registry = f.text()
		case fieldShortname:
			info.shortname = f.text()
		case fieldNamespace:
			info.namespace = f.text()
		case fieldAlias:
			info.alias = f.text()
		case fieldHeadless:
			info.headless = f.varint() != 0
		case fieldNear:
			info.near = f.number()
		case fieldPorts:
			var port portInfo
			port, f.err = parsePort(f.value)
			info.ports = append(info.ports, port)
		case fieldDestinations:
			var d destinationInfo
			d, f.err = parseDestination(f.value)
			info.destinations = append(info.destinations, d)
		}
	}
	return f.err
}

// parsePort parses a Port in wire form.
func parsePort(b []byte) (p portInfo, err error) {
	f := fields{message: "Port", rest: b}
	for f.next() {
		switch f.tag {
		case fieldPortName:
			p.name = f.text()
		case fieldPortNumber:
			p.number = f.number()
		case fieldPortProtocol:
			p.protocol = f.text()
		case fieldPortIPs:
			p.ips = append(p.ips, f.text())
		}
	}
	return p, f.err
}

// parseDestination parses a Destination in wire form.
func parseDestination(b []byte) (d destinationInfo, err error) {
	f := fields{message: "Destination", rest: b}
	for f.next() {
		switch f.tag {
		case fieldDestinationPort:
			d.port = f.number()
		case fieldDestinationTarget:
			d.target = f.number()
		case fieldDestinationEndpoints:
			d.endpoints = append(d.endpoints, f.text())
		}
	}
	return d, f.err
}
