package chans_test

import (
	"testing"

	"github.com/nametap/nametap/internal/chans"
)

func TestWake(t *testing.T) {
	t.Parallel()
	channel := make(chan struct{}, 1)
	chans.Wake(channel)
	chans.Wake(channel) // does not block
	if n := len(channel); n != 1 {
		t.Errorf("%d values wait, want 1", n)
	}
}

func TestClosed(t *testing.T) {
	t.Parallel()
	channel := make(chan struct{})
	if chans.Closed(channel) {
		t.Error("an open channel counts as closed")
	}
	close(channel)
	if !chans.Closed(channel) {
		t.Error("a closed channel counts as open")
	}
}
