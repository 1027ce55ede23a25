package conntrack

import (
	"os"
	"strconv"
	"strings"
)

// Full reports whether connection tracking of this network namespace has at least 99 % of the entries that the
// kernel allows. When it has all of them, the kernel drops the first packet of every further flow. count and limit
// are 0 if the kernel does not tell them. Full needs no capability.
func Full() (count, limit int, full bool) {
	count, limit = setting("count"), setting("max")
	return count, limit, limit > 0 && count >= limit-limit/100
}

// setting reads a setting of connection tracking, 0 if there is none.
func setting(name string) int {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(text))) // 0 on an error
	return n
}
