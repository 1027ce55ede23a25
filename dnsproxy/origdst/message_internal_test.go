package origdst

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// entry returns a response with the attributes of a request turned round: what goes
// from src to dst is the original direction.
func entry(seq uint32, src, dst string) []byte {
	b := appendRequest(nil, seq, netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst))
	binary.NativeEndian.PutUint16(b[4:], messageNew)
	binary.NativeEndian.PutUint16(b[headers+2:], tupleOriginal|unix.NLA_F_NESTED)
	return b
}

// failure returns the kernel's answer to request 7 with an error.
func failure(code unix.Errno) []byte {
	b := make([]byte, 36)
	binary.NativeEndian.PutUint32(b, 36)
	binary.NativeEndian.PutUint16(b[4:], unix.NLMSG_ERROR)
	binary.NativeEndian.PutUint32(b[8:], 7)
	binary.NativeEndian.PutUint32(b[16:], uint32(-int32(code)))
	return b
}

// F14
func TestParseResponse(t *testing.T) {
	good := entry(7, "10.0.0.1:1000", "10.0.0.53:53")
	tooLong := append([]byte(nil), good...)
	binary.NativeEndian.PutUint32(tooLong, uint32(len(good)+1))
	for _, test := range []struct {
		name    string
		message []byte
		want    string // empty for an error
		ours    bool
		err     error
	}{
		{"IPv4", good, "10.0.0.53:53", true, nil},
		{"IPv6", entry(7, "[2001:db8::1]:1000", "[2001:db8::53]:53"), "[2001:db8::53]:53", true, nil},
		{"another lookup's", entry(6, "10.0.0.1:1000", "10.0.0.53:53"), "", false, nil},
		{"no entry", failure(unix.ENOENT), "", true, unix.ENOENT},
		{"not permitted", failure(unix.EPERM), "", true, unix.EPERM},
		{"acknowledged", failure(0), "", true, errMalformed},
		{"nothing", nil, "", true, errMalformed},
		{"cut", tooLong, "", true, errMalformed},
		{"a request", appendRequest(nil, 7, netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2")), "", true, errMalformed},
	} {
		got, ours, err := parseResponse(test.message, 7)
		if ours != test.ours || !errors.Is(err, test.err) || test.want != "" && got.String() != test.want || test.want == "" && got.IsValid() {
			t.Errorf("%s: %v, %v, %v", test.name, got, ours, err)
		}
	}
}

// F14
func FuzzParseResponse(f *testing.F) {
	f.Add(entry(7, "10.0.0.1:1000", "10.0.0.53:53"))
	f.Add(entry(7, "[2001:db8::1]:1000", "[2001:db8::53]:53"))
	f.Add(failure(unix.ENOENT))
	f.Fuzz(func(t *testing.T, message []byte) {
		original, ours, err := parseResponse(message, 7)
		if original.IsValid() != (ours && err == nil) {
			t.Errorf("%v, %v, %v", original, ours, err)
		}
	})
}
