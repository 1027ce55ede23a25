package agent

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/internal/cgroup"
	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/sockets"
)

// ConntrackEntries returns how many entries connection tracking has, and how many it may have.
func ConntrackEntries() problems.Resource {
	entries, limit := conntrack.Usage()
	return problems.Resource{Used: entries, Limit: limit}
}

// openFiles is the directory with a file for each open descriptor. Since Linux 6.2, the size of the directory is the
// number of descriptors.
const openFiles = "/proc/self/fd"

// descriptors returns how many descriptors the process has open, and how many it may have.
func descriptors() problems.Resource {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return problems.Resource{}
	}
	found := problems.Resource{Limit: limit.Cur}
	if info, err := os.Stat(openFiles); err == nil && info.Size() > 0 {
		found.Used = uint64(info.Size())
		return found
	}
	files, err := os.ReadDir(openFiles)
	switch {
	case err == nil:
		found.Used = uint64(len(files))
	case sockets.OutOfDescriptors(err):
		found.Used = found.Limit
	default:
		return problems.Resource{}
	}
	return found
}

// cgroupMemory returns how much memory the cgroup of this process uses, without memory that the kernel can free,
// and the limit.
func cgroupMemory() problems.Resource {
	used, limit := cgroup.Memory("/")
	return problems.Resource{Used: uint64(used), Limit: uint64(limit)} //nolint:gosec // not negative
}
