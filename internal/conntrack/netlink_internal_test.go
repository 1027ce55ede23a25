package conntrack

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// tuple returns a direction of a UDP flow as an attribute, in a zone unless that is 0.
func tuple(kind int, src, dst string, zone uint16) []byte {
	from, to := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	t := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	ip := t.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil)
	if from.Addr().Is4() {
		ip.AddRtAttr(nl.CTA_IP_V4_SRC, from.Addr().AsSlice())
		ip.AddRtAttr(nl.CTA_IP_V4_DST, to.Addr().AsSlice())
	} else {
		ip.AddRtAttr(nl.CTA_IP_V6_SRC, from.Addr().AsSlice())
		ip.AddRtAttr(nl.CTA_IP_V6_DST, to.Addr().AsSlice())
	}
	protocol := t.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
	protocol.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	protocol.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(from.Port()))
	protocol.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(to.Port()))
	if zone != 0 {
		t.AddRtAttr(tupleZone, nl.BEUint16Attr(zone))
	}
	return t.Serialize()
}

// message returns a message with this number.
func message(r Request, seq uint32) []byte {
	m := r.message()
	m.Seq = seq
	return m.Serialize()
}

// entry returns the reply with an entry whose original direction goes from src to dst.
func entry(seq uint32, src, dst string) []byte {
	return message(Request{Type: messageNew, Attributes: tuple(nl.CTA_TUPLE_ORIG, src, dst, 0)}, seq)
}

// failure returns the kernel's reply to request 7 with an error, or with none.
func failure(code unix.Errno) []byte {
	m := nl.NewNetlinkRequest(unix.NLMSG_ERROR, 0)
	m.Seq = 7
	m.AddRawData(nl.Uint32Attr(uint32(-int32(code))))
	return m.Serialize()
}

// F14
func TestParseLookup(t *testing.T) {
	good := entry(7, "10.0.0.1:1000", "10.0.0.53:53")
	tooLong := append([]byte(nil), good...)
	binary.NativeEndian.PutUint32(tooLong, uint32(len(good)+1))
	for _, test := range []struct {
		name    string
		message []byte
		want    string // empty for an error
		matched bool
		err     error
	}{
		{"IPv4", good, "10.0.0.53:53", true, nil},
		{"IPv6", entry(7, "[2001:db8::1]:1000", "[2001:db8::53]:53"), "[2001:db8::53]:53", true, nil},
		{"another lookup's", entry(6, "10.0.0.1:1000", "10.0.0.53:53"), "", false, nil},
		{"no entry", failure(unix.ENOENT), "", true, unix.ENOENT},
		{"not permitted", failure(unix.EPERM), "", true, unix.EPERM},
		{"acknowledged", failure(0), "", true, errMalformed},
		{"an error without a code", failure(0)[:unix.SizeofNlMsghdr], "", true, errMalformed},
		{"nothing", nil, "", true, errMalformed},
		{"cut", tooLong, "", true, errMalformed},
		{"a request", message(Request{Type: messageGet, Attributes: tuple(nl.CTA_TUPLE_ORIG, "10.0.0.1:1", "10.0.0.2:2", 0)}, 7), "", true, errMalformed},
	} {
		got, matched, err := parseLookup(test.message, 7)
		if matched != test.matched || !errors.Is(err, test.err) || test.want != "" && got.String() != test.want || test.want == "" && got.IsValid() {
			t.Errorf("%s: %v, %v, %v", test.name, got, matched, err)
		}
	}
}

// F14
func FuzzParseLookup(f *testing.F) {
	f.Add(entry(7, "10.0.0.1:1000", "10.0.0.53:53"))
	f.Add(entry(7, "[2001:db8::1]:1000", "[2001:db8::53]:53"))
	f.Add(failure(unix.ENOENT))
	f.Fuzz(func(t *testing.T, message []byte) {
		original, matched, err := parseLookup(message, 7)
		if original.IsValid() != (matched && err == nil) {
			t.Errorf("%v, %v, %v", original, matched, err)
		}
	})
}

// K8: a dump that was interrupted is repeated, but not forever.
func TestInterruptedDump(t *testing.T) {
	for _, test := range []struct {
		name               string
		interrupted, dumps int
		err                error
	}{
		{"never", 0, 1, nil},
		{"twice", 2, 3, nil},
		{"always", dumpAttempts, dumpAttempts, nl.ErrDumpInterrupted},
	} {
		dumps := 0
		err := repeated(func() error {
			if dumps++; dumps <= test.interrupted {
				return nl.ErrDumpInterrupted
			}
			return nil
		})
		if !errors.Is(err, test.err) || dumps != test.dumps {
			t.Errorf("%s: %v after %d dumps, want %v after %d", test.name, err, dumps, test.err, test.dumps)
		}
	}
}

// K8: an entry's zone is the zone of its original direction, whether the entry is in the zone
// with both directions or with one.
func TestParseEntry(t *testing.T) {
	original, reply := "10.0.0.1:1000 10.0.0.53:53", "127.0.0.1:15053 10.0.0.1:1000"
	replies := tuple(nl.CTA_TUPLE_REPLY, "127.0.0.1:15053", "10.0.0.1:1000", 0)
	attribute := func(b []byte, kind int, value ...byte) []byte {
		return append(b, nl.NewRtAttr(kind, value).Serialize()...)
	}
	both := append(tuple(nl.CTA_TUPLE_ORIG, "10.0.0.1:1000", "10.0.0.53:53", 0), replies...)
	both = attribute(both, nl.CTA_ID, 1, 2, 3, 4)
	one := append(tuple(nl.CTA_TUPLE_ORIG, "10.0.0.1:1000", "10.0.0.53:53", 53), replies...)
	state := nl.NewRtAttr(nl.CTA_PROTOINFO|unix.NLA_F_NESTED, nil)
	state.AddRtAttr(nl.CTA_PROTOINFO_TCP|unix.NLA_F_NESTED, nil).AddRtAttr(nl.CTA_PROTOINFO_TCP_STATE, []byte{8})
	keys := []string{""}
	for _, test := range []struct {
		name       string
		attributes []byte
		zone       uint16
		tcp        TCPState
		replied    bool
	}{
		{"without", both, 0, 0, false},
		{"with both", attribute(both, nl.CTA_ZONE, 0, 53), 53, 0, false},
		{"with one, without a reply", attribute(one, nl.CTA_STATUS, 0, 0, 1, 0x88), 53, 0, false},
		{"with a state and a reply", attribute(append(state.Serialize(), both...), nl.CTA_STATUS, 0, 0, 1, 0x8a), 0, TCPClose, true},
	} {
		e := parseEntry(test.attributes)
		text := func(t Tuple) string { return t.Source.String() + " " + t.Destination.String() }
		if text(e.Original) != original || text(e.Reply) != reply || e.Original.Protocol != unix.IPPROTO_UDP || e.Zone != test.zone || e.TCP != test.tcp || e.Replied != test.replied {
			t.Errorf("%s: %+v", test.name, e)
		}
		if key := string(entryKey(test.attributes)); key == keys[len(keys)-1] {
			t.Errorf("%s: the key of another entry", test.name)
		} else {
			keys = append(keys, key)
		}
	}
}

// K8
func FuzzEntry(f *testing.F) {
	f.Add(tuple(nl.CTA_TUPLE_ORIG, "[2001:db8::1]:1000", "[2001:db8::53]:53", 53))
	f.Fuzz(func(t *testing.T, attributes []byte) {
		e := parseEntry(attributes)
		if key := entryKey(attributes); e.Original != (Tuple{}) && len(key) < attributeHeader {
			t.Errorf("entry %+v has no key", e)
		}
	})
}

// A subscription that is refused leaves no file that closes the descriptor of something else when it is collected.
func TestSubscribeRefused(t *testing.T) {
	for range 10 {
		if socket, err := Subscribe(unix.NETLINK_ROUTE, 1<<20); err == nil {
			socket.Close()
			t.Fatal("the kernel has such a group")
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		defer w.Close()
		for range 2 {
			runtime.GC() // the second one waits for the finalizers of the first
		}
		if _, err := w.WriteString("x"); err != nil {
			t.Fatal(err)
		}
	}
}
