package reply_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// A11: a relayed message is cut at a record's boundary, and keeps its OPT record.
func TestCut(t *testing.T) {
	msg := new(dns.Msg).SetUpdate("example.")
	msg.Response = true
	var rrs []dns.RR
	for i := range 60 {
		rrs = append(rrs, records(t, fmt.Sprintf("host-%d.example. 300 A 192.0.2.%d", i, i))...)
	}
	msg.Insert(rrs)
	msg.SetEdns0(1232, false)
	msg.Compress = true
	msg.SetTsig("key.", dns.HmacSHA256, 300, 1)
	wire, _, err := dns.TsigGenerate(msg, "c2VjcmV0", "", false)
	if err != nil {
		t.Fatal(err)
	}
	if got := reply.Cut(bytes.Clone(wire), len(wire)); !bytes.Equal(got, wire) {
		t.Errorf("a message that fits was changed: %x", got)
	}
	for limit := 512; limit < len(wire); limit++ {
		cut := reply.Cut(bytes.Clone(wire), limit)
		got := unpack(t, cut)
		switch {
		case len(cut) > limit || !got.Truncated || got.Opcode != dns.OpcodeUpdate || got.IsEdns0() == nil || got.IsTsig() != nil:
			t.Fatalf("limit %d: %d bytes, %v", limit, len(cut), got)
		case len(got.Question) != 1 || len(got.Ns) == 0 || len(got.Ns) < len(rrs) && len(cut)+30 < limit:
			t.Fatalf("limit %d: %d bytes, %d records", limit, len(cut), len(got.Ns))
		}
		for i, rr := range got.Ns {
			if rr.String() != msg.Ns[i].String() {
				t.Fatalf("limit %d, record %d: %v, want %v", limit, i, rr, msg.Ns[i])
			}
		}
	}
}

// TestCutMalformed cuts messages that cannot be walked.
func TestCutMalformed(t *testing.T) {
	const www = "\x03www\x07example\x00"
	question := newRaw(0, www)
	loop := append(newRaw(0, www, 1).record("\xC0\x1D", 1, "\xC0\x00\x02\x01"), make([]byte, 600)...)
	want := bytes.Clone(question)
	want[2] |= 2 // TC
	if got := reply.Cut(loop, 512); !bytes.Equal(got, want) {
		t.Errorf("loop: %x, want %x", got, want)
	}
	none := append(newRaw(0, "\xC0\x0C"), make([]byte, 600)...)
	want = append([]byte{0x12, 0x34, 0x82, 0}, make([]byte, 8)...)
	if got := reply.Cut(none, 512); !bytes.Equal(got, want) {
		t.Errorf("question: %x, want %x", got, want)
	}
	if got := reply.Cut(make([]byte, 11), 5); len(got) != 5 {
		t.Errorf("no header: %x", got)
	}
}
