package upstream_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// A message with an opcode other than QUERY is sent once, however late the reply is, and to
// another server only after a failure (A11).
func TestOtherOpcodesOnce(t *testing.T) {
	t.Parallel()
	late := func(query []byte, _ string) [][]byte {
		time.Sleep(600 * time.Millisecond) //nolint:forbidigo // the server is slower than the longest retry interval
		return [][]byte{reply(query, 0)}
	}
	first, second := serve(t, late), serve(t, late)
	update := bytes.Clone(query())
	update[2] |= 5 << 3
	g := client(t, upstream.Config{}).Group(specs(first, second), upstream.Options{})
	if _, from, err := g.Exchange(context.Background(), update, upstream.UDPOnly); err != nil || from != first.spec().String() {
		t.Errorf("answered by %v: %v", from, err)
	}
	updates := func(s *raw) (n int) {
		for _, packet := range s.queries() { // there are probes, too
			if packet[2]&0x78 == 5<<3 {
				n++
			}
		}
		return n
	}
	if n, m := updates(first), updates(second); n != 1 || m != 0 {
		t.Errorf("sent %d and %d times", n, m)
	}
	_ = first.udp.Close()
	if _, from, err := g.Exchange(context.Background(), update, upstream.UDPOnly); err != nil || from != second.spec().String() {
		t.Errorf("answered by %v: %v", from, err)
	}
}
