package agent

import (
	"slices"
	"testing"
)

// V5: systemd-resolved gets the domains of the PTR names of automatic VIPs.
func TestVirtualReverse(t *testing.T) {
	t.Parallel()
	want := []string{"240.in-addr.arpa", "0.0.0.0.2.0.0.0.1.0.0.2.ip6.arpa"}
	if got := virtualReverse(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
