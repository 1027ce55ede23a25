package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
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

// Freeze stops all processes of the machine, as a suspend does, until the function that it returns is called. The
// clocks and the network of the machine go on, unlike in a suspend.
func (m *Machine) Freeze() (thaw func()) {
	m.tb.Helper()
	write := func(state string) {
		m.tb.Helper()
		if err := os.WriteFile(filepath.Join(m.cgroup, "cgroup.freeze"), []byte(state), 0); err != nil {
			m.tb.Fatal(err)
		}
		wait.Until(m.tb, "the kernel has set frozen to "+state, func() bool {
			events, err := os.ReadFile(filepath.Join(m.cgroup, "cgroup.events"))
			if err != nil {
				m.tb.Fatal(err)
			}
			return strings.Contains(string(events), "frozen "+state+"\n")
		})
	}
	write("1")
	thaw = sync.OnceFunc(func() { write("0") })
	m.tb.Cleanup(thaw) // a frozen machine could not be ended
	return thaw
}
