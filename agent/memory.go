package agent

import (
	"runtime"
	"runtime/debug"
	"time"
)

// freeAfter is the time from the start, or from the last push that replaced a large part of the table, until memory is
// freed. Such a push that comes sooner needs the memory again.
const freeAfter = 2 * time.Second

// freeMemory collects garbage and returns free memory to the kernel. A push needs several times the size of the table,
// and Go keeps that memory until its next garbage collection, which may be far off in an agent that answers without
// allocating. `make bench ARGS=-memory` measures the memory. freeMemory takes a few milliseconds; queries are still
// answered meanwhile. It collects twice, because the contents of a sync.Pool survive one collection.
func freeMemory() {
	runtime.GC()
	debug.FreeOSMemory() // collects garbage again
}
