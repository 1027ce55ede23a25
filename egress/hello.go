package egress

import (
	"errors"
	"fmt"
)

// MaxHello is the length in bytes up to which the start of a connection is read for a name: the
// longest handshake message that crypto/tls accepts, and as much for HTTP.
const MaxHello = 64 << 10

// Numbers of the TLS protocol (RFC 8446, sections 4, 5.1 and 4.2; RFC 6066, section 3).
const (
	recordHandshake  = 22
	recordHeaderLen  = 5
	maxRecordLen     = 1<<14 + 2048 // of an encrypted record of TLS 1.2, which crypto/tls allows here, too
	messageHello     = 1
	messageHeaderLen = 4
	randomLen        = 32
	extensionName    = 0
	nameTypeHost     = 0
	maxMajor         = 0x10 // no TLS; the version of a record does not count otherwise (RFC 8446, section 5.1)
)

// Errors of [helloName] and [httpName].
var (
	// errMore says that the bytes are a valid beginning.
	errMore = errors.New("more bytes are needed")
	// errNoName says that the client sent no name.
	errNoName = errors.New("the client sent no name")
)

// A malformed error says what is wrong with the start of a connection.
type malformed string

// Error returns the text.
func (m malformed) Error() string { return string(m) }

// helloName returns the server name (SNI) of the ClientHello at the start of b, as the client sent
// it. The message may be spread over any number of records. The error is errMore if b is a proper
// prefix of a message, errNoName if the message has no name, and a malformed one otherwise.
func helloName(b []byte) (string, error) {
	message, err := helloMessage(b)
	if err != nil {
		return "", err
	}
	return nameOf(message)
}

// helloMessage returns the body of the handshake message at the start of b, which is a view of b if
// one record holds it.
func helloMessage(b []byte) ([]byte, error) {
	var joined []byte // of several records
	for first := true; ; first = false {
		fragment, rest, err := cutRecord(b)
		if err != nil {
			return nil, err
		}
		b = rest
		if first {
			joined = fragment[:len(fragment):len(fragment)]
		} else {
			joined = append(joined, fragment...)
		}
		if len(joined) < messageHeaderLen {
			continue
		}
		if joined[0] != messageHello {
			return nil, malformed(fmt.Sprintf("handshake message of type %d, want a ClientHello", joined[0]))
		}
		n := int(joined[1])<<16 | int(joined[2])<<8 | int(joined[3])
		if n > MaxHello {
			return nil, malformed(fmt.Sprintf("a ClientHello of %d bytes, want at most %d", n, MaxHello))
		}
		if end := messageHeaderLen + n; len(joined) >= end {
			return joined[messageHeaderLen:end], nil
		}
	}
}

// cutRecord returns the fragment of the record at the start of b, and what follows the record.
func cutRecord(b []byte) (fragment, rest []byte, err error) {
	if len(b) > 0 && b[0] != recordHandshake {
		return nil, nil, malformed(fmt.Sprintf("record of type %d, want a handshake", b[0]))
	}
	if len(b) > 1 && b[1] >= maxMajor {
		return nil, nil, malformed(fmt.Sprintf("record of version %d, want 3", b[1]))
	}
	if len(b) < recordHeaderLen {
		return nil, nil, errMore
	}
	n := int(b[3])<<8 | int(b[4])
	switch end := recordHeaderLen + n; {
	case n == 0:
		return nil, nil, malformed("an empty record")
	case n > maxRecordLen:
		return nil, nil, malformed(fmt.Sprintf("a record of %d bytes, want at most %d", n, maxRecordLen))
	case len(b) < end:
		return nil, nil, errMore
	default:
		return b[recordHeaderLen:end], b[end:], nil
	}
}

// nameOf returns the server name of the body of a ClientHello.
func nameOf(body []byte) (string, error) {
	r := reader{body}
	ok := r.skip(2+randomLen) && r.skipVector(1) && r.skipVector(2) && r.skipVector(1)
	if ok && len(r.rest) == 0 {
		return "", errNoName // TLS 1.2 allows no extensions
	}
	extensions, ok2 := r.vector(2)
	if !ok || !ok2 || len(r.rest) > 0 {
		return "", malformed("the ClientHello's lengths do not match")
	}
	name, found := "", false
	seen := map[uint16]bool{}
	for e := (reader{extensions}); len(e.rest) > 0; {
		kind, ok := e.number(2)
		data, ok2 := e.vector(2)
		if !ok || !ok2 {
			return "", malformed("the lengths of an extension do not match")
		}
		if seen[uint16(kind)] { //nolint:gosec // two bytes
			return "", malformed(fmt.Sprintf("two extensions of type %d", kind))
		}
		seen[uint16(kind)] = true //nolint:gosec // two bytes
		if kind != extensionName {
			continue
		}
		var err error
		if name, err = serverName(data); err != nil {
			return "", err
		}
		found = name != ""
	}
	if !found {
		return "", errNoName
	}
	return name, nil
}

// serverName returns the host name in the data of a server_name extension; empty if it has names of
// other types only.
func serverName(data []byte) (string, error) {
	r := reader{data}
	list, ok := r.vector(2)
	if !ok || len(r.rest) > 0 || len(list) == 0 {
		return "", malformed("the lengths of the server name do not match")
	}
	name := ""
	for names := (reader{list}); len(names.rest) > 0; {
		kind, ok := names.number(1)
		value, ok2 := names.vector(2)
		switch {
		case !ok || !ok2 || len(value) == 0:
			return "", malformed("the lengths of the server name do not match")
		case kind != nameTypeHost:
			continue
		case name != "":
			return "", malformed("two server names")
		case value[len(value)-1] == '.':
			return "", malformed("a server name that ends in a dot (RFC 6066, section 3)")
		}
		name = string(value)
	}
	return name, nil
}

// A reader reads big-endian numbers and vectors with a length before them. Its methods report false
// if there are too few bytes.
type reader struct{ rest []byte }

// number reads a number of size bytes.
func (r *reader) number(size int) (n int, ok bool) {
	if len(r.rest) < size {
		return 0, false
	}
	for _, b := range r.rest[:size] {
		n = n<<8 | int(b)
	}
	r.rest = r.rest[size:]
	return n, true
}

// skip skips n bytes.
func (r *reader) skip(n int) bool {
	if len(r.rest) < n {
		return false
	}
	r.rest = r.rest[n:]
	return true
}

// vector reads a vector whose length is a number of size bytes.
func (r *reader) vector(size int) (v []byte, ok bool) {
	n, ok := r.number(size)
	if !ok || len(r.rest) < n {
		return nil, false
	}
	v, r.rest = r.rest[:n], r.rest[n:]
	return v, true
}

// skipVector skips a vector.
func (r *reader) skipVector(size int) bool {
	_, ok := r.vector(size)
	return ok
}
