package agent

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/sockets"
)

// conntrackEntries returns how many entries connection tracking has, and how many it may have.
func conntrackEntries() problems.Resource {
	count, limit, _ := conntrack.Full()
	return problems.Resource{Used: uint64(count), Limit: uint64(limit)}
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

// The files of control groups.
const (
	ownGroup  = "/proc/self/cgroup"
	groupRoot = "/sys/fs/cgroup"
)

// cgroupMemory returns the memory that the control group of the process uses and the kernel cannot free, and the limit
// of the group. It supports only cgroup v2, and ignores limits of parent groups.
func cgroupMemory() (found problems.Resource) {
	text, err := os.ReadFile(ownGroup)
	if err != nil {
		return found
	}
	_, group, v2 := strings.Cut("\n"+string(text), "\n0::")
	if !v2 {
		return found
	}
	group, _, _ = strings.Cut(group, "\n")
	read := func(name string) string {
		value, err := os.ReadFile(filepath.Join(groupRoot, group, name))
		if err != nil {
			return ""
		}
		return string(bytes.TrimSpace(value))
	}
	limit, err := strconv.ParseUint(read("memory.max"), 10, 64) // or "max"
	if err != nil {
		return found
	}
	used, err := strconv.ParseUint(read("memory.current"), 10, 64)
	if err != nil {
		return found
	}
	for line := range strings.Lines(read("memory.stat")) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "active_file" || name == "inactive_file" || name == "slab_reclaimable" {
			free, _ := strconv.ParseUint(value, 10, 64) // 0 on an error
			used -= min(free, used)
		}
	}
	return problems.Resource{Used: used, Limit: limit}
}
