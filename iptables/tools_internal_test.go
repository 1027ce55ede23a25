package iptables

import "testing"

// A removal that is retried for 15 s can fail more than 40 times.
func TestBackOff(t *testing.T) {
	for n := range 100 {
		if wait := backOff(n); wait < firstPause || wait >= 2*longestPause {
			t.Errorf("after failure %d: %v, want %v to %v", n, wait, firstPause, 2*longestPause)
		}
	}
}
