// Package cgroup finds out how much memory this process may use.
package cgroup

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// MemoryLimit returns the lowest memory limit, in bytes, of the cgroup of this process and the cgroups around it; 0 if there
// is none. It reads the file system at root.
func MemoryLimit(root string) (limit int64) {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0 // not Linux, or there is no /proc
	}
	for line := range strings.Lines(string(text)) {
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(rest, ":")
		mount, name := "sys/fs/cgroup", "memory.max"
		switch {
		case id == "0" && controllers == "": // version 2
		case slices.Contains(strings.Split(controllers, ","), "memory"): // version 1
			mount, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container, the path of a cgroup of version 1 is its path on the host, and does not exist here.
		for group = path.Clean("/" + group); ; group = path.Dir(group) {
			if n := readNumber(filepath.Join(root, mount, group, name)); n > 0 && (limit == 0 || n < limit) {
				limit = n
			}
			if group == "/" {
				break
			}
		}
	}
	return limit
}

// MachineMemory returns the memory of the machine, in bytes; 0 if it cannot be read.
func MachineMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit) //nolint:gosec // of another type on other architectures
}

// readNumber returns the number in a file of a cgroup; 0 for no limit: "max", or the largest number of version 1.
func readNumber(name string) int64 {
	text, _ := os.ReadFile(name) // no limit if it is missing
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || n > 1<<60 {
		return 0
	}
	return n
}
