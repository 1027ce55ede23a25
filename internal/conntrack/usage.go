package conntrack

import (
	"os"
	"strconv"
	"strings"
)

// Usage returns how many entries connection tracking of this network namespace has, and how many the kernel allows.
// When there are as many as allowed, the kernel drops the first packet of every further flow. Both are 0 if they
// cannot be read. Usage needs no capability.
func Usage() (entries, limit uint64) { return setting("count"), setting("max") }

// setting reads a setting of connection tracking, 0 if there is none.
func setting(name string) uint64 {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // 0 on an error
	return n
}
