package reply_test

import (
	"bytes"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
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
