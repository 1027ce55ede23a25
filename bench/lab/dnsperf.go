package lab

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

	"github.com/nametap/nametap/bench/report"
)

// maxLost is the share of lost queries from which on a run does not count.
const maxLost = 0.001

// A Load is one run of dnsperf.
type Load struct {
	Addr    netip.AddrPort
	Queries string // file
	Seconds int
	// Rate is in queries per second; 0 is as fast as answers arrive.
	Rate int
	TCP  bool
	// Core binds dnsperf to a processor; "" leaves it free.
	Core string
	// Waiting is the limit of queries in flight; 0 is 100. With a higher limit, a slow
	// server does not slow down the client.
	Waiting int
	// Patience is how long dnsperf waits for an answer, in seconds; 0 is 2.
	Patience int
	// Latencies also measures the time of every query.
	Latencies bool
}

// A Tally is dnsperf's report of a run.
type Tally struct {
	Sent, Completed, Lost, NoError int
	PerSecond                      float64
	// Latencies are sorted; nil if they were not measured.
	Latencies []time.Duration
}

// String describes the load for messages.
func (l Load) String() string {
	network, rate := "UDP", "saturated"
	if l.TCP {
		network = "TCP"
	}
	if l.Rate > 0 {
		rate = report.Thousands(l.Rate) + "/s"
	}
	return strings.Join([]string{filepath.Base(l.Queries), network, rate}, " ")
}

// arguments returns dnsperf's arguments for l. Each of dnsperf's clients is a socket; eight
// of them share the queries in flight.
func (l Load) arguments() []string {
	argv := []string{
		"dnsperf", "-s", l.Addr.Addr().String(), "-p", strconv.Itoa(int(l.Addr.Port())), "-d", l.Queries,
		"-l", strconv.Itoa(l.Seconds), "-c", "8", "-T", "1",
		"-q", strconv.Itoa(cmp.Or(l.Waiting, 100)), "-t", strconv.Itoa(cmp.Or(l.Patience, 2)),
	}
	if l.Core != "" {
		argv = append([]string{"taskset", "-c", l.Core}, argv...)
	}
	if l.Rate > 0 {
		argv = append(argv, "-Q", strconv.Itoa(l.Rate))
	}
	if l.TCP {
		argv = append(argv, "-m", "tcp")
	}
	if l.Latencies {
		argv = append(argv, "-v")
	}
	return argv
}

// Run runs the load and returns its tally. It fails if too many queries were lost or had
// another response code than NOERROR.
func (l Load) Run(ctx context.Context) (Tally, error) {
	t, err := l.Drive(ctx)
	if err != nil {
		return Tally{}, err
	}
	return t, t.valid()
}

// Drive is like Run, but accepts lost queries and other response codes.
func (l Load) Drive(ctx context.Context) (Tally, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(l.Seconds+l.Patience+10)*time.Second)
	defer cancel()
	text, err := Output(ctx, l.arguments()...)
	if err != nil {
		return Tally{}, err
	}
	return parseDNSPerf(text)
}

// valid returns an error if the run does not count.
func (t Tally) valid() error {
	switch {
	case t.Completed == 0:
		return errors.New("no query was answered")
	case float64(t.Lost) >= maxLost*float64(t.Sent):
		return fmt.Errorf("%d of %d queries were lost", t.Lost, t.Sent)
	case t.NoError != t.Completed:
		return fmt.Errorf("%d of %d answers are not NOERROR", t.Completed-t.NoError, t.Completed)
	}
	return nil
}

// Quantile returns the latency that a share q of the queries did not exceed.
func (t Tally) Quantile(q float64) time.Duration {
	return Quantile(t.Latencies, q)
}

// Quantile returns the time that a share q of the sorted times does not exceed, or 0
// without times.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// parseDNSPerf reads what dnsperf prints: one line a query if it was verbose, then
// the statistics.
func parseDNSPerf(text string) (Tally, error) {
	t := Tally{Sent: -1, Completed: -1, Lost: -1}
	var err error
	for line := range strings.Lines(text) {
		label, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		fields := strings.Fields(value)
		switch {
		case strings.HasPrefix(line, "> "):
			err = t.addLatency(line)
		case label == "Queries sent":
			err = parseCount(fields, 0, &t.Sent)
		case label == "Queries completed":
			err = parseCount(fields, 0, &t.Completed)
		case label == "Queries lost":
			err = parseCount(fields, 0, &t.Lost)
		case label == "Response codes":
			if at := slices.Index(fields, "NOERROR"); at >= 0 {
				err = parseCount(fields, at+1, &t.NoError)
			}
		case label == "Queries per second":
			t.PerSecond, err = strconv.ParseFloat(strings.Join(fields, ""), 64)
		}
		if err != nil {
			return Tally{}, fmt.Errorf("parsing dnsperf's line %q: %w", strings.TrimSpace(line), err)
		}
	}
	if t.Sent < 0 || t.Completed < 0 || t.Lost < 0 {
		return Tally{}, fmt.Errorf("parsing dnsperf's output: no statistics in %q", text)
	}
	slices.Sort(t.Latencies)
	return t, nil
}

// addLatency reads a line "> RCODE NAME TYPE SECONDS". Lost queries have "T" for
// the code and no time.
func (t *Tally) addLatency(line string) error {
	fields := strings.Fields(line)
	if len(fields) != 5 {
		return nil
	}
	seconds, err := strconv.ParseFloat(fields[4], 64)
	if err != nil {
		return err
	}
	t.Latencies = append(t.Latencies, time.Duration(seconds*float64(time.Second)))
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
