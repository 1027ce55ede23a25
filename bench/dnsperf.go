package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxLost is the share of unanswered queries at which a run does not count.
const maxLost = 0.001

// A load is one run of dnsperf.
type load struct {
	addr    netip.AddrPort
	queries string // file
	seconds int
	// rate is in queries per second; 0 is as fast as answers arrive.
	rate int
	tcp  bool
	// core binds dnsperf to a processor; "" leaves it free.
	core string
	// waiting is the limit of queries in flight; 0 is 100. With a higher limit, a slow
	// server does not slow down the client.
	waiting int
	// latencies also measures the time of every query.
	latencies bool
}

// A tally is dnsperf's report of a run.
type tally struct {
	sent, completed, lost, noerror int
	perSecond                      float64
	// latencies are sorted; nil if they were not measured.
	latencies []time.Duration
}

// String describes the load for messages.
func (l load) String() string {
	network, rate := "UDP", "saturated"
	if l.tcp {
		network = "TCP"
	}
	if l.rate > 0 {
		rate = thousands(l.rate) + "/s"
	}
	return strings.Join([]string{filepath.Base(l.queries), network, rate}, " ")
}

// arguments returns dnsperf's arguments for l. Each of dnsperf's clients is a socket; eight
// of them share the queries in flight.
func (l load) arguments() []string {
	argv := []string{
		"dnsperf", "-s", l.addr.Addr().String(), "-p", strconv.Itoa(int(l.addr.Port())), "-d", l.queries,
		"-l", strconv.Itoa(l.seconds), "-c", "8", "-T", "1",
		"-q", strconv.Itoa(cmp.Or(l.waiting, 100)), "-t", "2",
	}
	if l.core != "" {
		argv = append([]string{"taskset", "-c", l.core}, argv...)
	}
	if l.rate > 0 {
		argv = append(argv, "-Q", strconv.Itoa(l.rate))
	}
	if l.tcp {
		argv = append(argv, "-m", "tcp")
	}
	if l.latencies {
		argv = append(argv, "-v")
	}
	return argv
}

// run runs the load and returns its tally. It fails if too many queries were lost or had
// another response code than NOERROR.
func (l load) run(ctx context.Context) (tally, error) {
	t, err := l.drive(ctx)
	if err != nil {
		return tally{}, err
	}
	return t, t.valid()
}

// drive is like run, but accepts lost queries and other response codes.
func (l load) drive(ctx context.Context) (tally, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(l.seconds+10)*time.Second)
	defer cancel()
	text, err := output(ctx, l.arguments()...)
	if err != nil {
		return tally{}, err
	}
	return parseDNSPerf(text)
}

// valid returns an error if the run does not count.
func (t tally) valid() error {
	switch {
	case t.completed == 0:
		return errors.New("no query was answered")
	case float64(t.lost) >= maxLost*float64(t.sent):
		return fmt.Errorf("%d of %d queries were lost", t.lost, t.sent)
	case t.noerror != t.completed:
		return fmt.Errorf("%d of %d answers are not NOERROR", t.completed-t.noerror, t.completed)
	}
	return nil
}

// quantile returns the latency that a share q of the queries did not exceed.
func (t tally) quantile(q float64) time.Duration {
	return quantile(t.latencies, q)
}

// parseDNSPerf reads what dnsperf prints: one line a query if it was verbose, then
// the statistics.
func parseDNSPerf(text string) (tally, error) {
	t := tally{sent: -1, completed: -1, lost: -1}
	var err error
	for line := range strings.Lines(text) {
		label, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		fields := strings.Fields(value)
		switch {
		case strings.HasPrefix(line, "> "):
			err = t.addLatency(line)
		case label == "Queries sent":
			err = parseCount(fields, 0, &t.sent)
		case label == "Queries completed":
			err = parseCount(fields, 0, &t.completed)
		case label == "Queries lost":
			err = parseCount(fields, 0, &t.lost)
		case label == "Response codes":
			if at := slices.Index(fields, "NOERROR"); at >= 0 {
				err = parseCount(fields, at+1, &t.noerror)
			}
		case label == "Queries per second":
			t.perSecond, err = strconv.ParseFloat(strings.Join(fields, ""), 64)
		}
		if err != nil {
			return tally{}, fmt.Errorf("parsing dnsperf's line %q: %w", strings.TrimSpace(line), err)
		}
	}
	if t.sent < 0 || t.completed < 0 || t.lost < 0 {
		return tally{}, fmt.Errorf("parsing dnsperf's output: no statistics in %q", text)
	}
	slices.Sort(t.latencies)
	return t, nil
}

// addLatency reads a line "> RCODE NAME TYPE SECONDS". Lost queries have "T" for
// the code and no time.
func (t *tally) addLatency(line string) error {
	fields := strings.Fields(line)
	if len(fields) != 5 {
		return nil
	}
	seconds, err := strconv.ParseFloat(fields[4], 64)
	if err != nil {
		return err
	}
	t.latencies = append(t.latencies, time.Duration(seconds*float64(time.Second)))
	return nil
}

// parseCount reads fields[at] into n.
func parseCount(fields []string, at int, n *int) error {
	if at >= len(fields) {
		return errors.New("no number")
	}
	value, err := strconv.Atoi(fields[at])
	*n = value
	return err
}
