package reply_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/reply"
)

// F3: Check gives the same result as Parse for every reply, also when its memory is reused.
func TestCheck(t *testing.T) {
	t.Parallel()
	var checker reply.Checker
	for range 2 {
		for name, msg := range replies(t) {
			wire := pack(t, msg)
			for n := range len(wire) + 1 {
				want, wantErr := reply.Parse(append([]byte(nil), wire[:n]...))
				rcode, negative, err := checker.Check(wire[:n])
				if (err == nil) != (wantErr == nil) {
					t.Fatalf("%s, %d bytes: %v, want %v", name, n, err, wantErr)
				}
				if err != nil {
					continue
				}
				if rcode != want.Rcode() {
					t.Errorf("%s, %d bytes: response code %d, want %d", name, n, rcode, want.Rcode())
				}
				if empty := rcode == dns.RcodeNameError || rcode == dns.RcodeSuccess && want.Answers() == 0; empty && !negative {
					t.Errorf("%s, %d bytes: it is not negative", name, n)
				}
			}
		}
	}
}
