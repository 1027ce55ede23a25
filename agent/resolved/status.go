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
	Off        State = "off"        // no agent is registered, and no attempt has failed
	Registered State = "registered" // an agent is registered
	Failed     State = "failed"     // the last attempt to register, or Inspect, has failed
)

// A Status is the state of a registration.
type Status struct {
	State   State  `json:"state"`
	Domains int    `json:"domains"`          // number of registered domains
	Others  int    `json:"others,omitempty"` // number of domains beyond the limit, which are not registered
	Repairs uint64 `json:"repairs"`
	Error   string `json:"error,omitempty"` // why the state is Failed
}

// defaultDir exists if systemd-resolved has run since the host was booted.
const defaultDir = "/run/systemd/resolve"

// exists reports whether there is a file or a directory at path.
func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Inspect asks systemd-resolved whether any agent is registered. It changes nothing.
func Inspect(ctx context.Context) Status {
	if !exists(defaultDir) {
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
