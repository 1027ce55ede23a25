package agent

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/agent/problems"
)

// lapses counts the interruptions of the capture. It logs a cause again after a minute without it.
type lapses struct {
	log *slog.Logger

	mu    sync.Mutex
	known []problems.Lapse // guarded by mu
}

// add counts an interruption.
func (l *lapses) add(cause problems.LapseCause) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.known, func(lapse problems.Lapse) bool { return lapse.Cause == cause })
	if i < 0 {
		i, l.known = len(l.known), append(l.known, problems.Lapse{Cause: cause})
	}
	lapse := &l.known[i]
	lapse.Count++
	if time.Since(lapse.Last) >= time.Minute {
		l.log.Warn("the capture was interrupted: queries may have gone to nameservers", "cause", cause, "times", lapse.Count)
	}
	lapse.Last = time.Now()
}

// list returns the interruptions so far.
func (l *lapses) list() []problems.Lapse {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.known)
}

// queueDrops returns how many packets the kernel has dropped because the queue of a UDP socket at a port was full: see
// proc_net(5).
func queueDrops(port uint16) (drops uint64) {
	const local, dropped = 1, 12
	for _, table := range []string{"udp", "udp6"} {
		text, _ := os.ReadFile("/proc/net/" + table) // without the family, there is no such file
		for line := range strings.Lines(string(text)) {
			if row := strings.Fields(line); len(row) > dropped && strings.HasSuffix(row[local], fmt.Sprintf(":%04X", port)) {
				n, _ := strconv.ParseUint(row[dropped], 10, 64)
				drops += n
			}
		}
	}
	return drops
}
