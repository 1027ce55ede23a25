package deploy

import (
	"strings"
	"testing"
)

// V3: nss-lookup.target waits until the agent reports that it is ready, which is after the
// rules are in (TestSystemd).
func TestBootOrder(t *testing.T) {
	t.Parallel()
	unit := read(t, "systemd/nametap.service")
	for _, line := range []string{"Type=notify", "Wants=nss-lookup.target", "Before=nss-lookup.target"} {
		if !strings.Contains(unit, "\n"+line+"\n") {
			t.Errorf("the unit has no line %q", line)
		}
	}
}

// V1: the sockets of a running agent do not begin to block when another service starts with them.
func TestSocketsDoNotBlock(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"nametap.service", "nametap-rules.service", "nametap-resolved@.service"} {
		unit := read(t, "systemd/"+name)
		if strings.Contains(unit, "\nSockets=") != strings.Contains(unit, "\nNonBlocking=yes\n") {
			t.Errorf("%s: want NonBlocking=yes with Sockets=", name)
		}
	}
}
