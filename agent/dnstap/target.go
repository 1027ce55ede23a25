package dnstap

import (
	"errors"
	"net"
	"strconv"
	"strings"
)

// A Target is where the receiver listens. The zero Target means no receiver.
type Target struct {
	network string // unix or tcp
	address string
}

// errTarget is the error for a text that is not a target.
var errTarget = errors.New("want unix:///PATH or tcp://HOST:PORT")

// maxPath is the longest path of a unix socket.
const maxPath = 107

// String returns the text that UnmarshalText reads.
func (t Target) String() string {
	if t == (Target{}) {
		return ""
	}
	return t.network + "://" + t.address
}

// MarshalText returns the text that UnmarshalText reads.
func (t Target) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads unix:///PATH or tcp://HOST:PORT. An empty text means no receiver.
func (t *Target) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*t = Target{}
		return nil
	}
	network, address, _ := strings.Cut(string(text), "://")
	switch network {
	case "unix":
		if !strings.HasPrefix(address, "/") || len(address) < 2 || len(address) > maxPath || strings.Contains(address, "\x00") {
			return errTarget
		}
	case "tcp":
		host, port, err := net.SplitHostPort(address)
		number, numberErr := strconv.ParseUint(port, 10, 16)
		if err != nil || numberErr != nil || host == "" || number == 0 {
			return errTarget
		}
	default:
		return errTarget
	}
	*t = Target{network, address}
	return nil
}
