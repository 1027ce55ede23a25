package vm

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/nametap/nametap/test/machines/cgroup"
)

// cgroupPrefix begins the names of the machines' cgroups. The process ID of the test follows.
const cgroupPrefix = "nt-vm-"

// unified returns where cgroups of version 2 are mounted.
func unified() (string, error) {
	hierarchies, err := cgroup.Hierarchies()
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(hierarchies, func(h cgroup.Hierarchy) bool { return h.Unified })
	if i < 0 {
		return "", errors.New("needs cgroups of version 2, run: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
	}
	return hierarchies[i].Path, nil
}

// newCgroup makes a cgroup for one machine. Two machines in one cgroup would use the same
// cgroup for the same unit.
func newCgroup() (string, error) {
	dir, err := unified()
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(dir, fmt.Sprintf("%s%d-", cgroupPrefix, os.Getpid()))
}

// removeCgroups ends the machines of the processes that match, and removes their cgroups in up
// to 5 s.
func removeCgroups(match func(pid int) bool) error {
	dirs, err := cgroup.Of(cgroupPrefix, match)
	if err != nil {
		return err
	}
	return cgroup.Remove(5*time.Second, dirs...)
}
