package resolved

import (
	"context"
	"os"
)

// A State is the state of a registration. Its text does not change between versions.
type State string

// The states.
const (
	Absent     State = "absent"     // this host does not run systemd-resolved
	Off        State = "off"        // not desired
	Registered State = "registered" // in force
	Failed     State = "failed"     // and retried
)

// A Status says what of a registration is in force.
type Status struct {
	State   State  `json:"state"`
	Domains int    `json:"domains"`          // registered
	Others  int    `json:"others,omitempty"` // left out because of the limit
	Repairs uint64 `json:"repairs"`
	Error   string `json:"error,omitempty"` // why it failed
}

// defaultDir exists if systemd-resolved has run since the host was booted.
const defaultDir = "/run/systemd/resolve"

// present reports whether this host has systemd-resolved.
func present(dir string) bool {
	_, err := os.Stat(dir)
	return err == nil
}

// Inspect asks systemd-resolved whether any agent is registered. It changes nothing.
func Inspect(ctx context.Context) Status {
	if !present(defaultDir) {
		return Status{State: Absent}
	}
	status, err := inspect(ctx)
	if err != nil {
		return Status{State: Failed, Error: err.Error()}
	}
	return status
}

func inspect(ctx context.Context) (Status, error) {
	b, err := dialBus(ctx)
	if err != nil {
		return Status{}, err
	}
	defer b.close()
	running, err := b.running(ctx)
	if err != nil || !running {
		return Status{State: Absent}, err
	}
	index, err := findLink()
	if err != nil || index == 0 {
		return Status{State: Off}, err
	}
	l, err := b.link(ctx, index)
	if err != nil {
		return Status{}, err
	}
	if !l.inUse || len(l.servers) == 0 {
		return Status{State: Off}, nil
	}
	return Status{State: Registered, Domains: len(l.domains)}, nil
}
