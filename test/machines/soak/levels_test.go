package soak

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// A sample is the state of the processes at a time. A value of -1 is unknown.
type sample struct {
	at          time.Time
	starts      int // of the agent
	descriptors int
	goroutines  int
	anonymous   int // KiB, of the agent
	control     int // KiB, of the control plane
	conntrack   int // entries of the host
	dropped     int // packets for which a socket had no room
}

// Levels are samples over time.
type levels struct {
	world  *world
	client http.Client
	mu     sync.Mutex
	list   []sample
}

func newLevels(w *world) *levels {
	l := &levels{world: w}
	l.client = http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			w.host.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, address) })
			return conn, err
		},
	}}
	return l
}

// run samples every 5 s.
func (l *levels) run(ctx context.Context) {
	for ok := true; ok; ok = clock.Sleep(ctx, 5*time.Second) {
		s := l.sample()
		l.mu.Lock()
		l.list = append(l.list, s)
		l.mu.Unlock()
	}
}

// sample takes one sample.
func (l *levels) sample() sample {
	pid, starts := l.world.agent.running()
	control, _ := l.world.control.running()
	s := sample{at: time.Now(), starts: starts, descriptors: -1, goroutines: int(l.metric("go_goroutines")), anonymous: anonymous(pid), control: anonymous(control), conntrack: -1, dropped: -1}
	if files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); err == nil {
		s.descriptors = len(files)
	}
	l.world.host.Run(func() {
		if text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count"); err == nil {
			s.conntrack, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		s.dropped = receiveErrors()
	})
	return s
}

// receiveErrors returns the number of UDP packets for which a socket of the calling thread's
// namespace had no room.
func receiveErrors() int {
	sum := 0
	for _, file := range []string{"snmp", "snmp6"} {
		text, err := os.ReadFile(filepath.Join("/proc/thread-self/net", file))
		if err != nil {
			return -1
		}
		lines := strings.Split(string(text), "\n")
		for i, line := range lines {
			fields := strings.Fields(line)
			switch {
			case len(fields) == 2 && fields[0] == "Udp6RcvbufErrors":
				n, _ := strconv.Atoi(fields[1])
				sum += n
			case len(fields) > 2 && fields[0] == "Udp:" && slices.Contains(fields, "RcvbufErrors") && i+1 < len(lines):
				n, _ := strconv.Atoi(strings.Fields(lines[i+1])[slices.Index(fields, "RcvbufErrors")])
				sum += n
			}
		}
	}
	return sum
}

// anonymous returns the anonymous memory of a process in KiB.
func anonymous(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return -1
	}
	_, after, found := strings.Cut(string(text), "RssAnon:")
	if !found {
		return -1
	}
	kib, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		return -1
	}
	return kib
}

// metric returns the value of a metric of the agent without labels, -1 if it cannot be read.
func (l *levels) metric(name string) float64 {
	metrics, err := l.get("/metrics")
	if err != nil {
		return -1
	}
	for line := range strings.Lines(metrics) {
		if text, found := strings.CutPrefix(strings.TrimSpace(line), name+" "); found {
			if value, err := strconv.ParseFloat(text, 64); err == nil {
				return value
			}
		}
	}
	return -1
}

// get returns what the agent answers to a request of its status address.
func (l *levels) get(path string) (string, error) {
	request, err := http.NewRequestWithContext(l.world.tb.Context(), http.MethodGet, "http://"+statusAddr+path, nil)
	if err != nil {
		return "", err
	}
	response, err := l.client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return string(text), err
}

// lowest returns the lowest value in the samples of a time; -1 if it is unknown in all. A leak
// raises it; queries that wait for a nameserver do not.
func (l *levels) lowest(from, until time.Time, value func(sample) int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var values []int
	for _, s := range l.list {
		if v := value(s); v >= 0 && s.at.After(from) && s.at.Before(until) {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return -1
	}
	return slices.Min(values)
}

// A level is a value that must not grow.
type level struct {
	name  string
	value func(sample) int
	slack int // that it may grow besides a quarter
}

func allLevels() []level {
	return []level{
		{"descriptors", func(s sample) int { return s.descriptors }, 20},
		{"goroutines", func(s sample) int { return s.goroutines }, 30},
		{"anonymous memory, KiB", func(s sample) int { return s.anonymous }, 4 << 10},
		{"control plane's memory, KiB", func(s sample) int { return s.control }, 16 << 10},
		// Each local port may have an entry, for some minutes.
		{"conntrack entries", func(s sample) int { return s.conntrack }, 28_000},
	}
}

// compare logs the lowest value of each level at two times, and fails the test if one has grown,
// if strict.
func (l *levels) compare(t *testing.T, early, recent span, strict bool) {
	t.Helper()
	for _, v := range allLevels() {
		before, after := l.lowest(early.from, early.until, v.value), l.lowest(recent.from, recent.until, v.value)
		t.Logf("%-28s %8d → %8d", v.name, before, after)
		if strict && after > before+before/4+v.slack {
			t.Errorf("%s: %d in %s, %d in %s", v.name, before, early, after, recent)
		}
	}
}

// String returns the span as text.
func (s span) String() string { return s.from.Format(timeFormat) + " to " + s.until.Format(timeFormat) }

// table logs a line for every minute or so.
func (l *levels) table(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	b.WriteString("    at      starts  fds  goroutines  anon KiB  control KiB  conntrack  dropped\n")
	step := max(len(l.list)/25, 1)
	for i := 0; i < len(l.list); i += step {
		s := l.list[i]
		fmt.Fprintf(&b, "    %s %5d %5d %8d %10d %11d %10d %8d\n", s.at.Format("15:04:05"), s.starts, s.descriptors, s.goroutines, s.anonymous, s.control, s.conntrack, s.dropped)
	}
	t.Logf("levels:\n%s", &b)
}
