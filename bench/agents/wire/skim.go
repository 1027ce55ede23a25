package wire

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// A level is a kind of message that a Skimmer enters.
type level int

const (
	inResponse level = iota
	inResource       // of the incremental variant
	inAny
	inTable
)

// A Skimmer decodes a response whose parts arrive one after the other, and skips the entries of tables, so
// it needs little memory. It does not know resources with names in the state-of-the-world variant.
type Skimmer struct {
	Variant Variant

	kept  []byte   // the NameTable without its entries
	own   []byte   // the other fields of the response
	rest  []byte   // the end of the last part, which was not decoded yet
	skip  int      // how many bytes of a field are still to be skipped
	outer []opened // messages that were entered, the innermost last
	err   error
}

// An opened is a message that was entered, and how many of its bytes are left.
type opened struct {
	level level
	left  int
}

// Part takes a part of the response.
func (s *Skimmer) Part(part []byte) {
	s.rest = append(s.rest, part...)
	b := s.rest
	for s.err == nil && len(b) > 0 {
		n := s.step(b)
		if n == 0 {
			break // more is needed
		}
		b = b[n:]
		s.pass(n)
	}
	s.rest = append(s.rest[:0], b...)
}

// pass counts n bytes in all open messages, and leaves messages that end.
func (s *Skimmer) pass(n int) {
	for i := range s.outer {
		s.outer[i].left -= n
	}
	for len(s.outer) > 0 && s.outer[len(s.outer)-1].left == 0 {
		s.outer = s.outer[:len(s.outer)-1]
	}
}

// step decodes the beginning of b, and returns the length of what it has decoded; 0 if it needs more.
func (s *Skimmer) step(b []byte) int {
	if s.skip > 0 {
		n := min(s.skip, len(b))
		s.skip -= n
		return n
	}
	at := inResponse
	if len(s.outer) > 0 {
		at = s.outer[len(s.outer)-1].level
	}
	number, kind, tag := protowire.ConsumeTag(b)
	if tag < 0 {
		return s.unless(len(b) >= maxTag)
	}
	if kind != protowire.BytesType {
		n := protowire.ConsumeFieldValue(number, kind, b[tag:])
		if n < 0 {
			return s.unless(len(b) >= 2*maxTag)
		}
		return tag + n
	}
	size, length := protowire.ConsumeVarint(b[tag:])
	if length < 0 {
		return s.unless(len(b) >= 2*maxTag)
	}
	head := tag + length
	if inner, ok := s.enters(at, number); ok && size > 0 {
		s.outer = append(s.outer, opened{inner, head + int(size)}) // pass then subtracts the head
		return head
	}
	if at == inTable && number != fieldChange || at == inAny || at == inResource {
		s.skip = int(size)
		return head
	}
	if len(b) < head+int(size) {
		return 0
	}
	if at == inTable {
		s.kept = append(s.kept, b[:head+int(size)]...)
	} else {
		s.own = append(s.own, b[:head+int(size)]...)
	}
	return head + int(size)
}

// maxTag is the longest varint.
const maxTag = 10

// unless returns 0, which asks for more bytes. If enough is true, there are enough bytes already, and it
// sets an error.
func (s *Skimmer) unless(enough bool) int {
	if enough {
		s.err = errMalformed
	}
	return 0
}

// enters returns the level of the message in a field, and whether the Skimmer enters that message.
func (s *Skimmer) enters(at level, number protowire.Number) (level, bool) {
	const resources, body = 2, 2
	switch {
	case at == inResponse && number == resources && s.Variant == Incremental:
		return inResource, true
	case at == inResponse && number == resources:
		return inAny, true
	case at == inResource && number == body:
		return inAny, true
	case at == inAny && number == body:
		return inTable, true
	}
	return 0, false
}

// Parse ends a response, and decodes it into r. r gets one resource: a NameTable without entries, and
// without a change if the response has none. After Parse, the Skimmer can take another response.
func (s *Skimmer) Parse(r *Response) error {
	resources := r.Resources[:0]
	kept, err := s.kept, s.err
	if err == nil && (len(s.rest) > 0 || len(s.outer) > 0 || s.skip > 0) {
		err = errMalformed
	}
	if err == nil {
		err = s.Variant.Parse(s.own, r)
	}
	r.Resources = append(resources, Resource{Table: kept})
	*s = Skimmer{Variant: s.Variant}
	return err
}
