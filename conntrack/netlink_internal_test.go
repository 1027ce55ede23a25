package conntrack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// entry returns the reply with an entry whose original direction goes from src to dst. It is
// a request whose tuple is changed from the reply direction to the original direction.
func entry(seq uint32, src, dst string) []byte {
	b := appendLookup(nil, seq, netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst))
	binary.NativeEndian.PutUint16(b[4:], messageNew)
	binary.NativeEndian.PutUint16(b[netlinkHeader+netfilterHeader+2:], entryOriginal|unix.NLA_F_NESTED)
	return b
}

// failure returns the kernel's reply to request 7 with an error, or with none.
func failure(code unix.Errno) []byte { return control(unix.NLMSG_ERROR, 0, 7, code) }

// control returns a message that ends an answer.
func control(kind, flags uint16, seq uint32, code unix.Errno) []byte {
	b := appendHeader(nil, seq, Request{Type: kind, Flags: flags})[:netlinkHeader]
	b = binary.NativeEndian.AppendUint32(b, uint32(-int32(code)))
	setLength(b)
	return b
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
		{"nothing", nil, "", true, errMalformed},
		{"cut", tooLong, "", true, errMalformed},
		{"a request", appendLookup(nil, 7, netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2")), "", true, errMalformed},
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

// F14, K8: an answer is read to its end: other exchanges' replies are skipped, errors are
// returned, and a dump that was interrupted anywhere does not count as complete.
func TestAnswer(t *testing.T) {
	const seq = 7
	dumped := entry(seq, "10.0.0.1:1000", "10.0.0.53:53")
	interrupted := append([]byte(nil), dumped...)
	binary.NativeEndian.PutUint16(interrupted[6:], unix.NLM_F_MULTI|unix.NLM_F_DUMP_INTR)
	done := control(unix.NLMSG_DONE, unix.NLM_F_MULTI, seq, 0)
	for _, test := range []struct {
		name     string
		messages [][]byte
		visited  int
		done     bool
		err      error
	}{
		{"a part", [][]byte{dumped, dumped}, 2, false, nil},
		{"a dump", [][]byte{dumped, dumped, done}, 2, true, nil},
		{"an empty dump", [][]byte{done}, 0, true, nil},
		{"interrupted at an entry", [][]byte{interrupted, dumped, done}, 2, true, ErrInterrupted},
		{"interrupted at the end", [][]byte{dumped, control(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, seq, 0)}, 1, true, ErrInterrupted},
		{"a dump that failed", [][]byte{dumped, control(unix.NLMSG_DONE, 0, seq, unix.ENOMEM)}, 1, true, unix.ENOMEM},
		{"acknowledged", [][]byte{failure(0)}, 0, true, nil},
		{"refused", [][]byte{failure(unix.EPERM)}, 0, true, unix.EPERM},
		{"another exchange's", [][]byte{control(unix.NLMSG_DONE, 0, seq-1, 0), entry(seq+1, "10.0.0.1:1", "10.0.0.2:2")}, 0, false, nil},
		{"cut", [][]byte{dumped[:len(dumped)-1]}, 0, true, errMalformed},
		{"an error without a code", [][]byte{failure(0)[:netlinkHeader]}, 0, true, errMalformed},
	} {
		visited := 0
		a := answer{first: seq, last: seq, acked: seq, visit: func(b []byte) {
			visited++
			if got := parseEntry(b).Original.Destination.String(); got != "10.0.0.53:53" {
				t.Errorf("%s: visited %s", test.name, got)
			}
		}}
		done, err := a.read(bytes.Join(test.messages, nil))
		if done != test.done || !errors.Is(err, test.err) || visited != test.visited {
			t.Errorf("%s: %v, %v after %d entries; want %v, %v after %d",
				test.name, done, err, visited, test.done, test.err, test.visited)
		}
	}
}

// kernel returns a Conn to a fake kernel that gives these answers, one datagram each, to
// one request after the other.
func kernel(t *testing.T, answers ...func(seq uint32) []byte) *Conn {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	c := &Conn{fd: fds[0], buffer: make([]byte, exchangeBuffer)}
	file := os.NewFile(uintptr(fds[1]), "kernel")
	t.Cleanup(func() { c.Close(); file.Close() })
	done := make(chan struct{})
	t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		request := make([]byte, exchangeBuffer)
		for _, answer := range answers {
			if _, err := file.Read(request); err != nil {
				t.Error(err)
				return
			}
			if _, err := file.Write(answer(binary.NativeEndian.Uint32(request[8:]))); err != nil {
				t.Error(err)
			}
		}
	}()
	return c
}

// K8: a dump that was interrupted is repeated, but not forever.
func TestInterruptedDump(t *testing.T) {
	dump := func(flags uint16) func(uint32) []byte {
		return func(seq uint32) []byte {
			return append(entry(seq, "10.0.0.1:1000", "10.0.0.53:53"), control(unix.NLMSG_DONE, flags, seq, 0)...)
		}
	}
	complete, interrupted := dump(0), dump(unix.NLM_F_DUMP_INTR)
	for _, test := range []struct {
		name    string
		answers []func(uint32) []byte
		err     error
	}{
		{"never", []func(uint32) []byte{complete}, nil},
		{"twice", []func(uint32) []byte{interrupted, interrupted, complete}, nil},
		{"always", slices.Repeat([]func(uint32) []byte{interrupted}, dumpAttempts), ErrInterrupted},
	} {
		t.Run(test.name, func(t *testing.T) {
			visited := 0
			err := kernel(t, test.answers...).Exchange(func([]byte) { visited++ }, Request{Type: messageGet, Flags: unix.NLM_F_DUMP})
			if !errors.Is(err, test.err) || visited != len(test.answers) {
				t.Errorf("%v after %d entries, want %v after %d", err, visited, test.err, len(test.answers))
			}
		})
	}
}

// K8: a kernel that does not reply does not block the caller forever.
func TestNoReply(t *testing.T) {
	c := kernel(t)
	wait := unix.NsecToTimeval(int64(10 * time.Millisecond))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		t.Fatal(err)
	}
	err := c.Exchange(func([]byte) {}, Request{Type: messageGet, Flags: unix.NLM_F_DUMP})
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want %v", err, os.ErrDeadlineExceeded)
	}
}

// K8: an entry's zone is that of its original direction, whether the entry is in the zone
// with both directions or with one.
func TestParseEntry(t *testing.T) {
	tuple := func(kind uint16, src, dst string, zone uint16) []byte {
		return appendNested(nil, kind, func(b []byte) []byte {
			request := appendLookup(nil, 0, netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst))
			b = append(b, FindAttribute(request[netlinkHeader+netfilterHeader:], entryReply)...)
			if zone != 0 {
				b = AppendAttribute(b, tupleZone, binary.BigEndian.AppendUint16(nil, zone))
			}
			return b
		})
	}
	original, reply := "10.0.0.1:1000 10.0.0.53:53", "127.0.0.1:15053 10.0.0.1:1000"
	both := append(tuple(entryOriginal, "10.0.0.1:1000", "10.0.0.53:53", 0), tuple(entryReply, "127.0.0.1:15053", "10.0.0.1:1000", 0)...)
	both = AppendAttribute(both, entryID, []byte{1, 2, 3, 4})
	one := append(tuple(entryOriginal, "10.0.0.1:1000", "10.0.0.53:53", 53), tuple(entryReply, "127.0.0.1:15053", "10.0.0.1:1000", 0)...)
	state := appendNested(nil, entryProtoInfo, func(b []byte) []byte {
		return appendNested(b, protoInfoTCP, func(b []byte) []byte {
			return AppendAttribute(b, protoInfoTCPState, []byte{8})
		})
	})
	keys := []string{""}
	for _, test := range []struct {
		name       string
		attributes []byte
		zone       uint16
		tcp        TCPState
		replied    bool
	}{
		{"without", both, 0, 0, false},
		{"with both", AppendAttribute(both, entryZone, []byte{0, 53}), 53, 0, false},
		{"with one, without a reply", AppendAttribute(one, entryStatus, []byte{0, 0, 1, 0x88}), 53, 0, false},
		{"with a state and a reply", AppendAttribute(append(state, both...), entryStatus, []byte{0, 0, 1, 0x8a}), 0, TCPClose, true},
	} {
		e := parseEntry(test.attributes)
		text := func(t Tuple) string { return t.Source.String() + " " + t.Destination.String() }
		if text(e.Original) != original || text(e.Reply) != reply || e.Original.Protocol != unix.IPPROTO_UDP || e.Zone != test.zone || e.TCP != test.tcp || e.Replied != test.replied {
			t.Errorf("%s: %+v", test.name, e)
		}
		if e.Key() == keys[len(keys)-1] {
			t.Errorf("%s: the key is that of another entry", test.name)
		}
		keys = append(keys, e.Key())
	}
}

// K8
func FuzzAnswer(f *testing.F) {
	good := entry(7, "[2001:db8::1]:1000", "[2001:db8::53]:53")
	f.Add(append(good, control(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 7, 0)...))
	f.Add(failure(unix.ENOENT))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		a := answer{first: 7, last: 8, acked: 8, visit: func(b []byte) {
			if e := parseEntry(b); len(e.Key()) < attributeHeader {
				t.Errorf("entry %+v has no key", e)
			}
		}}
		if done, err := a.read(datagram); err != nil && !done {
			t.Errorf("%v, but more is expected", err)
		}
	})
}
