package reply_test

import (
	"bytes"
	"testing"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// A11: a relayed message that is too long loses its records, and has TC.
func TestCut(t *testing.T) {
	const www = "\x03www\x07example\x00"
	long := append(newRaw(0, www, 1).record("\xC0\x1D", 1, "\xC0\x00\x02\x01"), make([]byte, 600)...)
	if got := reply.Cut(bytes.Clone(long), len(long)); !bytes.Equal(got, long) {
		t.Errorf("a message that fits was changed: %x", got)
	}
	want := newRaw(0x0200, www) // with TC
	if got := reply.Cut(long, 512); !bytes.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
	none := append(newRaw(0, "\xC0\x0C"), make([]byte, 600)...) // without a question that can be read
	want = append([]byte{0x12, 0x34, 0x82, 0}, make([]byte, 8)...)
	if got := reply.Cut(none, 512); !bytes.Equal(got, want) {
		t.Errorf("question: %x, want %x", got, want)
	}
}
