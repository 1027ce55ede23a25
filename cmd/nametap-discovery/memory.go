package main

import (
	"math"
	"os"
	"runtime/debug"

	"github.com/nametap/nametap/internal/cgroup"
)

const (
	// gcPercent is how much the heap may grow before garbage is collected, in percent of the memory in use. Nearly all
	// of that memory is for objects, tables and connections, which stay. With Go's default of 100, garbage could take
	// as much memory as these. With 50, garbage would take 6 KiB more for each of 10,000 agents than with 25.
	gcPercent = 25
	// goShare is the part of a cgroup's memory that Go may use, in percent. The rest is for the pages of the binary,
	// 26 MiB, and for the sockets of the kernel.
	goShare = 85
)

// boundMemory makes the process collect garbage early, unless the user has set GOGC. It limits the process to goShare
// of the cgroup's memory, unless the user has set GOMEMLIMIT. It returns the limit; 0 for none.
func boundMemory() int64 {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := cgroup.MemoryLimit("/"); os.Getenv("GOMEMLIMIT") == "" && limit > 0 {
		debug.SetMemoryLimit(limit / 100 * goShare)
	}
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 {
		return limit
	}
	return 0
}
