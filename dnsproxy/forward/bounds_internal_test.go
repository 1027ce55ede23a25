package forward

import (
	"fmt"
	"testing"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// F16: while a dead domain has all the slots that it may have, names beside it get slots.
// One in 2,048 used to be refused because its count was also that of the dead domain.
func TestSlotsBesideDeadDomain(t *testing.T) {
	t.Parallel()
	s := newSlots(64)
	slotFor := func(format string, i int) slot {
		name, err := wire.ParseHostname(fmt.Sprintf(format, i))
		if err != nil {
			t.Fatal(err)
		}
		return s.slotFor(name)
	}
	for i := range 64 {
		sl := slotFor("n%d.dead.zone.example", i)
		if !sl.take() {
			break
		}
	}
	if sl := slotFor("n%d.dead.zone.example", 64); sl.available() {
		t.Fatal("the dead domain is not at its bound")
	}
	const names = 100_000
	refused := 0
	for i := range names {
		if sl := slotFor("w%d.zone.example", i); !sl.available() {
			refused++
		}
	}
	// By chance about one name in 4 million shares both counts.
	if refused > 3 {
		t.Errorf("%d of %d names beside the dead domain are refused", refused, names)
	}
}
