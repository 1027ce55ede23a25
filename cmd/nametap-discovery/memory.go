package main

import (
	"math"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
)

const (
	// gcPercent is by how much the heap may grow before garbage is collected, in percent of what is in use.
	// Nearly all of that are objects, tables and connections, which stay, so Go's default of 100 would reserve as
	// much memory again for garbage. With 10,000 agents, 25 in place of 50 saves 6 KiB for each.
	gcPercent = 25
	// goShare is the part of the memory of a cgroup that Go may use, in percent. The rest is for pages of the binary,
	// 26 MiB, and for the sockets of the kernel.
	goShare = 85
)

// boundMemory makes the process collect garbage early, unless the user has set GOGC, and use not more than its share
// of the cgroup's memory, unless the user has set GOMEMLIMIT. It returns the limit; 0 for none.
func boundMemory() int64 {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := cgroupLimit("/"); os.Getenv("GOMEMLIMIT") == "" && limit > 0 {
		debug.SetMemoryLimit(limit / 100 * goShare)
	}
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 {
		return limit
	}
	return 0
}

// cgroupLimit returns the memory limit of the cgroup of this process, in bytes, as the file system at root shows it; 0
// for none. Limits of the cgroups around it count, too.
func cgroupLimit(root string) (limit int64) {
	text, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0 // not Linux, or there is no /proc
	}
	for line := range strings.Lines(string(text)) {
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, _ := strings.Cut(rest, ":")
		mount, file := "sys/fs/cgroup", "memory.max"
		switch {
		case id == "0" && controllers == "": // version 2
		case slices.Contains(strings.Split(controllers, ","), "memory"): // version 1
			mount, file = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
		default:
			continue
		}
		// In a container, the path of a cgroup of version 1 is the one on the host, and is missing.
		for group = path.Clean("/" + group); ; group = path.Dir(group) {
			if n := readLimit(filepath.Join(root, mount, group, file)); n > 0 && (limit == 0 || n < limit) {
				limit = n
			}
			if group == "/" {
				break
			}
		}
	}
	return limit
}

// readLimit returns the limit in a file of a cgroup; 0 for none.
func readLimit(name string) int64 {
	text, err := os.ReadFile(name)
	if err != nil {
		return 0
	}
	limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || limit > 1<<60 { // "max", or the largest number of version 1
		return 0
	}
	return limit
}
