package table

import (
	"fmt"
	"iter"
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// A fieldTag is the number of a field and its wire type, as on the wire.
type fieldTag uint64

// The fields of a NameTable; api/nds.proto explains them. Fields with another number or
// wire type are of later versions of the message.
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
	fieldAltHosts     = 5<<3 | bytesType
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

// wireEntries yields the entries of a NameTable in wire form, as views of it. An error is
// the last thing it yields.
func wireEntries(table []byte) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for len(table) > 0 {
			field, value, n := consumeField(table)
			if n < 0 {
				yield(nil, protowire.ParseError(n))
				return
			}
			table = table[n:]
			if field == fieldTable && !yield(value, nil) {
				return
			}
		}
	}
}

// A wireEntry is an entry of the map: views of its key and of its value.
type wireEntry struct{ key, info []byte }

// parseWireEntry splits an entry of the map into key and value.
func parseWireEntry(b []byte) (entry wireEntry, err error) {
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return wireEntry{}, protowire.ParseError(n)
		}
		switch field {
		case fieldMapKey:
			entry.key = value
		case fieldMapValue:
			entry.info = value
		}
		b = b[n:]
	}
	return entry, nil
}

// consumeField parses the field at the start of b. value is the content of a length-delimited
// field, and all bytes after the tag of another one. n is the field's length in bytes, negative
// for an error.
func consumeField(b []byte) (field fieldTag, value []byte, n int) {
	number, kind, tagLen := protowire.ConsumeTag(b)
	if tagLen < 0 {
		return 0, nil, tagLen
	}
	if kind == protowire.BytesType {
		value, n = protowire.ConsumeBytes(b[tagLen:])
	} else if n = protowire.ConsumeFieldValue(number, kind, b[tagLen:]); n >= 0 {
		value = b[tagLen:][:n]
	}
	if n < 0 {
		return 0, nil, n
	}
	return fieldTag(protowire.EncodeTag(number, kind)), value, tagLen + n
}

// A nameInfo is a parsed NameInfo. Its strings are views of the push.
type nameInfo struct {
	ips          []string
	altHosts     []string
	alias        string
	ports        []portInfo
	headless     bool
	near         uint64 // how many of ips, the first ones, are near
	destinations []destinationInfo
	hostInfo
}

// A portInfo is a parsed Port. Its strings are views of the push.
type portInfo struct {
	name, protocol string
	number         uint64
	ips            []string
}

// A destinationInfo is a parsed Destination. Its strings are views of the push.
type destinationInfo struct {
	port, target uint64
	endpoints    []string
}

// parse parses a NameInfo in wire form. It reuses the capacity of the lists.
func (info *nameInfo) parse(b []byte) error {
	*info = nameInfo{ips: info.ips[:0], altHosts: info.altHosts[:0], ports: info.ports[:0], destinations: info.destinations[:0]}
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch field {
		case fieldIPs, fieldRegistry, fieldShortname, fieldNamespace, fieldAltHosts, fieldAlias:
			if !utf8.Valid(value) {
				return fmt.Errorf("field %d of a NameInfo: %q is not UTF-8", field>>3, value)
			}
			info.setText(field, viewString(value))
		case fieldHeadless:
			headless, _ := protowire.ConsumeVarint(value)
			info.headless = headless != 0
		case fieldNear:
			info.near, _ = protowire.ConsumeVarint(value)
			info.near &= math.MaxUint32 // as a uint32 is decoded
		case fieldPorts:
			var port portInfo
			if err := port.parse(value); err != nil {
				return err
			}
			info.ports = append(info.ports, port)
		case fieldDestinations:
			var d destinationInfo
			if err := d.parse(value); err != nil {
				return err
			}
			info.destinations = append(info.destinations, d)
		}
	}
	return nil
}

// setText sets a field that is a text.
func (info *nameInfo) setText(field fieldTag, text string) {
	switch field {
	case fieldIPs:
		info.ips = append(info.ips, text)
	case fieldRegistry:
		info.registry = text
	case fieldShortname:
		info.shortname = text
	case fieldNamespace:
		info.namespace = text
	case fieldAltHosts:
		info.altHosts = append(info.altHosts, text)
	case fieldAlias:
		info.alias = text
	}
}

// parse parses a Port in wire form.
func (p *portInfo) parse(b []byte) error {
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch field {
		case fieldPortName, fieldPortProtocol, fieldPortIPs:
			if !utf8.Valid(value) {
				return fmt.Errorf("field %d of a Port: %q is not UTF-8", field>>3, value)
			}
		}
		switch text := viewString(value); field {
		case fieldPortName:
			p.name = text
		case fieldPortNumber:
			p.number, _ = protowire.ConsumeVarint(value)
			p.number &= math.MaxUint32 // as a uint32 is decoded
		case fieldPortProtocol:
			p.protocol = text
		case fieldPortIPs:
			p.ips = append(p.ips, text)
		}
	}
	return nil
}

// parse parses a Destination in wire form.
func (d *destinationInfo) parse(b []byte) error {
	for len(b) > 0 {
		field, value, n := consumeField(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch field {
		case fieldDestinationPort:
			d.port, _ = protowire.ConsumeVarint(value)
			d.port &= math.MaxUint32 // as a uint32 is decoded
		case fieldDestinationTarget:
			d.target, _ = protowire.ConsumeVarint(value)
			d.target &= math.MaxUint32 // the same
		case fieldDestinationEndpoints:
			if !utf8.Valid(value) {
				return fmt.Errorf("field %d of a Destination: %q is not UTF-8", field>>3, value)
			}
			d.endpoints = append(d.endpoints, viewString(value))
		}
	}
	return nil
}
