package reply_test

import (
	"bytes"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// F19: options for neighbours are not relayed, even if they are malformed; others are.
func TestHopOptions(t *testing.T) {
	t.Parallel()
	const cookie, padding, local = "\x00\x0a\x00\x02ab", "\x00\x0c\x00\x01\x00", "\xfd\xe9\x00\x01x"
	for options, want := range map[string]string{
		cookie + local + padding:        local,
		local + "\x00\x0a\x00\x08ab":    local, // a cookie that is longer than the record
		cookie + "\xfd\xe9\x00\x08ab":   "\xfd\xe9\x00\x08ab",
		local + cookie + "\xfd\xe9\x00": local + "\xfd\xe9\x00",
		"":                              "",
	} {
		msg := newRaw(0, "\x03www\x00", 0, 0, 1).record("\x00", 41, options)
		got := reply.Hop(msg, true, 1232)
		const ttl = "\x00\x00\x01\x2c" // of record
		wantOPT := "\x00\x00\x29\x04\xd0" + ttl + "\x00" + string(rune(len(want))) + want
		if !bytes.HasSuffix(got, []byte(wantOPT)) || len(got) != len(msg)-len(options)+len(want) {
			t.Errorf("options %q: %q, want %q at the end", options, got, wantOPT)
		}
	}
}

// F19: Signed finds TSIG and SIG(0) records, and Hop leaves signed messages as they are.
func TestHopSigned(t *testing.T) {
	t.Parallel()
	for _, rrtype := range []byte{byte(dns.TypeTSIG), byte(dns.TypeSIG)} {
		msg := newRaw(0, "\x03www\x00", 0, 0, 2).record("\x00", 41, "\x00\x0a\x00\x02ab").record("\x00", rrtype, "x")
		if !reply.Signed(msg) || !bytes.Equal(reply.Hop(msg, false, 1232), msg) {
			t.Errorf("type %d: signed %v, relayed as %x", rrtype, reply.Signed(msg), reply.Hop(msg, false, 1232))
		}
	}
	if msg := newRaw(0, "\x03www\x00"); reply.Signed(msg) {
		t.Error("a message without additional records is signed")
	}
}

// A9, R12: an option is added to the OPT record at the end of a response, and only if it fits; otherwise TC is set, but
// not over TCP.
func TestAddOption(t *testing.T) {
	option := wire.AppendProvenance(nil, []byte("{}"))
	without := pack(t, upstream(t, "www.example.", dns.TypeA, "www.example. 60 IN A 192.0.2.1"))
	withOPT := pack(t, unpack(t, without).SetEdns0(1232, true))
	long := unpack(t, withOPT)
	long.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_PADDING{Padding: make([]byte, dns.MaxMsgSize-len(withOPT)-len(option))}}
	for _, c := range []struct {
		msg              []byte
		limit            int
		added, truncated bool
	}{
		{withOPT, len(withOPT) + len(option), true, false},
		{withOPT, len(withOPT) + len(option) - 1, false, true},
		{pack(t, long), dns.MaxMsgSize, false, false},
		{append(bytes.Clone(withOPT), 0), dns.MaxMsgSize, false, false},
		{without, dns.MaxMsgSize, false, false},
		{nil, dns.MaxMsgSize, false, false},
	} {
		got := reply.AddOption(bytes.Clone(c.msg), option, c.limit)
		if added := len(got) == len(c.msg)+len(option); added != c.added || !added && len(got) != len(c.msg) {
			t.Errorf("%d bytes of at most %d became %d", len(c.msg), c.limit, len(got))
		}
		if len(got) > 0 && got[2]&wire.TC != 0 != c.truncated {
			t.Errorf("%d bytes of at most %d: want TC %v", len(c.msg), c.limit, c.truncated)
		}
		if msg := new(dns.Msg); c.added && (msg.Unpack(got) != nil || len(msg.IsEdns0().Option) != 1) {
			t.Errorf("want a message with the option:\n%v", msg)
		}
	}
}
