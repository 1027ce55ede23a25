package agent

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Lapse says how often, and when last, the capture was interrupted by one cause.
type Lapse struct {
	Cause LapseCause `json:"cause"`
	Count uint64     `json:"count"`
	Last  time.Time  `json:"last"`
}

// A LapseCause says why the capture was interrupted, and what to look at.
type LapseCause string

// The causes of interruptions.
const (
	LapseDead       LapseCause = "an earlier agent has ended without removing its rules, and no other answered in time: look at its log, journalctl -u nametap"
	LapseStandstill LapseCause = "the agent's process stood still for 2 s or more: look at SIGSTOP, its cgroup (frozen, cpu.stat) and the memory of the machine"
	LapseSilent     LapseCause = "the agent's process runs, but its listener does not answer: look at nametap capture check, nametap top --by client, since one client may fill its queue, and the stacks that kill -QUIT prints"
)

// parts returns the cause, and what to look at.
func (c LapseCause) parts() (cause, look string) {
	cause, look, _ = strings.Cut(string(c), ": ")
	return cause, look
}

// lapses counts the interruptions of the capture. It logs a cause again after a minute without it.
type lapses struct {
	log *slog.Logger

	mu    sync.Mutex
	known []Lapse // guarded by mu
}

// add counts an interruption.
func (l *lapses) add(cause LapseCause) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.known, func(lapse Lapse) bool { return lapse.Cause == cause })
	if i < 0 {
		i, l.known = len(l.known), append(l.known, Lapse{Cause: cause})
	}
	lapse := &l.known[i]
	lapse.Count++
	if time.Since(lapse.Last) >= time.Minute {
		l.log.Warn("the capture was interrupted: queries may have gone to nameservers", "cause", cause, "times", lapse.Count)
	}
	lapse.Last = time.Now()
}

// list returns the interruptions so far.
func (l *lapses) list() []Lapse {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.known)
}
