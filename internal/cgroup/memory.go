// Package cgroup finds out how much memory this process may use, and how much is in use.
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

// files has the names that one version of cgroups uses.
type files struct {
	mount, limit, used string
	freeable           []string // the lines of memory.stat with memory that the kernel can free
}

// MemoryLimit returns the limit that [Memory] returns.
func MemoryLimit(root string) int64 {
	_, limit := Memory(root)
	return limit
}

// Memory returns a memory limit and the memory that is in use, in bytes. It looks at the cgroup of this process and
// at the cgroups around it. limit is the lowest of their limits; it is 0 if there is no limit. used is how much
// memory the cgroup with this limit uses, without memory that the kernel can free. Memory reads the file system at
// root.
func Memory(root string) (used, limit int64) {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0, 0 // not Linux, or there is no /proc
	}
	for line := range strings.Lines(string(text)) {
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(rest, ":")
		names := files{"sys/fs/cgroup", "memory.max", "memory.current", []string{"active_file", "inactive_file", "slab_reclaimable"}}
		switch {
		case id == "0" && controllers == "": // version 2
		case slices.Contains(strings.Split(controllers, ","), "memory"): // version 1
			names = files{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", []string{"total_active_file", "total_inactive_file"}}
		default:
			continue
		}
		// In a container, the path of a cgroup of version 1 is its path on the host, and does not exist here.
		for group = path.Clean("/" + group); ; group = path.Dir(group) {
			dir := filepath.Join(root, names.mount, group)
			if n := readNumber(filepath.Join(dir, names.limit)); n > 0 && (limit == 0 || n < limit) {
				used, limit = names.usedIn(dir), n
			}
			if group == "/" {
				break
			}
		}
	}
	return used, limit
}

// usedIn returns how much memory the cgroup at dir uses, without memory that the kernel can free.
func (f files) usedIn(dir string) int64 {
	used := readNumber(filepath.Join(dir, f.used))
	stat, _ := os.ReadFile(filepath.Join(dir, "memory.stat")) // without it, nothing counts as free
	for line := range strings.Lines(string(stat)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if slices.Contains(f.freeable, name) {
			used -= number(value)
		}
	}
	return max(used, 0)
}

// MachineMemory returns the memory of the machine, in bytes; 0 if it cannot be read.
func MachineMemory() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit) //nolint:gosec // of another type on other architectures
}

// readNumber returns the number in a file of a cgroup; 0 for no limit.
func readNumber(name string) int64 {
	text, _ := os.ReadFile(name) // no limit if it is missing
	return number(strings.TrimSpace(string(text)))
}

// number returns the number in text; 0 for no limit: "max", or the largest number of version 1.
func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n > 1<<60 {
		return 0
	}
	return n
}
