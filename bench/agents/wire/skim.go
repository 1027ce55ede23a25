package wire

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// A Skimmer decodes a response whose parts arrive one after the other. It keeps the names and versions of resources, and
// skips their tables, so it needs little memory. It does not know resources with names in the state-of-the-world variant.
type Skimmer struct {
	Variant Variant

	own       []byte     // the fields of the response, without the resources
	resources []Resource // without tables
	rest      []byte     // the end of the last part, which was not decoded yet
	skip      int        // how many bytes of a field are still to be skipped
	left      int        // how many bytes of a resource are left; 0 outside of resources
	err       error
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
	}
	s.rest = append(s.rest[:0], b...)
}

// step decodes the beginning of b, and returns the length of what it has decoded; 0 if it needs more.
func (s *Skimmer) step(b []byte) int {
	if s.skip > 0 {
		n := min(s.skip, len(b))
		s.skip -= n
		return n
	}
	const resources, body = 2, 2
	number, kind, tag := protowire.ConsumeTag(b)
	if tag < 0 {
		return s.unless(len(b) >= maxTag)
	}
	if kind != protowire.BytesType {
		n := protowire.ConsumeFieldValue(number, kind, b[tag:])
		if n < 0 {
			return s.unless(len(b) >= 2*maxTag)
		}
		return s.pass(tag + n)
	}
	size, length := protowire.ConsumeVarint(b[tag:])
	if length < 0 {
		return s.unless(len(b) >= 2*maxTag)
	}
	head, inside := tag+length, s.left > 0
	switch {
	case !inside && number == resources:
		s.resources = append(s.resources, Resource{})
		if s.Variant == Incremental {
			s.left = int(size)
		} else {
			s.skip = int(size)
		}
		return head
	case inside && number == body:
		s.pass(head + int(size))
		s.skip = int(size)
		return head
	case len(b) < head+int(size):
		return 0
	}
	if field := b[:head+int(size)]; inside {
		s.err = s.resources[len(s.resources)-1].parse(field)
	} else {
		s.own = append(s.own, field...)
	}
	return s.pass(head + int(size))
}

// pass counts n bytes of a resource, and returns n.
func (s *Skimmer) pass(n int) int {
	if s.left > 0 {
		if s.left -= n; s.left < 0 {
			s.err = errMalformed
		}
	}
	return n
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

// Parse ends a response, and decodes it into r, whose resources have no tables. After Parse, the Skimmer can take another
// response.
func (s *Skimmer) Parse(r *Response) error {
	err := s.err
	if err == nil && (len(s.rest) > 0 || s.left > 0 || s.skip > 0) {
		err = errMalformed
	}
	if err == nil {
		err = s.Variant.Parse(s.own, r)
	}
	r.Resources = s.resources
	*s = Skimmer{Variant: s.Variant}
	return err
}
