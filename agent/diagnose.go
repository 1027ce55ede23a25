package agent

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/listen"
)

// diagnoseInterval is how often the conditions of all parts are read.
const diagnoseInterval = 4 * clock.Tick

// A diagnosis reads the conditions of all parts of an agent, and keeps the lasting problems.
type diagnosis struct {
	core     *core
	unserved func() []string // returns why addresses other than those for DNS cannot be opened
	window   condition.Window
}

// run reads the conditions until ctx ends.
func (d *diagnosis) run(ctx context.Context) {
	due, stop := d.core.clock.Poll(diagnoseInterval, func() bool { return true })
	defer stop()
	for {
		select {
		case <-due:
			d.core.observeGuard(ctx)
			d.read(*d.core.silent.Load())
		case <-ctx.Done():
			return
		}
	}
}

// read reads the conditions, and returns them with the lasting problems. The parameter silent has a text for each
// listener that does not answer. While the agent drains, or its listeners are not open yet, read returns the previous
// conditions.
func (d *diagnosis) read(silent []string) []condition.Condition {
	c := d.core
	if !c.draining.Load() && c.open() {
		conditions := slices.Concat([]condition.Condition{ConntrackCondition(), filesCondition()}, d.listening(silent), c.proxy.Conditions(), c.client.Conditions(), c.capture.conditions(), c.guardConditions())
		if c.config.Conditions != nil {
			conditions = append(c.config.Conditions(), conditions...)
		}
		d.window.Add(time.Now(), conditions)
	}
	return d.window.Conditions(time.Now())
}

// problems returns the raised problems.
func (d *diagnosis) problems() []condition.Problem {
	return condition.Judge(d.window.Conditions(time.Now())).Problems
}

// listening returns the conditions of the agent's own listeners.
func (d *diagnosis) listening(silent []string) []condition.Condition {
	taken := condition.Condition{Code: "address_taken", Title: "all addresses of the agent are open"}
	for _, text := range d.unserved() {
		taken.Problems = append(taken.Problems, condition.Problem{
			Severity: condition.Minor, Subject: text, What: "an address of the agent, not for DNS, cannot be opened; retrying", Evidence: text,
			Effect: "probes, metrics, commands or connections to VIPs may not reach the agent",
			Mend:   "ss -lntp shows which program has the port: end that program", Rows: []string{"R3"},
		})
	}
	answer := condition.Condition{
		Code: condition.ListenerSilent, Title: "all DNS listeners answer", Causes: []condition.Code{condition.ConntrackFull, condition.Descriptors},
	}
	if len(silent) > 0 {
		answer.Problems = []condition.Problem{{
			Severity: condition.Severe, What: "DNS listeners of the agent do not answer", Evidence: strings.Join(silent, "; "),
			Effect: "queries that these listeners get have no answer",
			Mend:   "look for a firewall that drops packets on loopback: nametap capture check", Rows: []string{"R2", "K21"},
		}}
	}
	return []condition.Condition{taken, answer}
}

// resourceCondition returns c with the problem p if a resource is full. A limit of 0 means that there is no limit, or that it
// is not known.
func resourceCondition(limit uint64, full bool, c condition.Condition, p condition.Problem) condition.Condition {
	switch {
	case limit == 0:
		c.Unknown = "there is no limit, or it cannot be read"
	case full:
		c.Problems = []condition.Problem{p}
	}
	return c
}

// filesCondition returns the condition of descriptors: at most 2 % of them, or four, are free.
func filesCondition() condition.Condition {
	used, limit := descriptors()
	c := condition.Condition{Code: condition.Descriptors, Title: "the agent has free descriptors"}
	return resourceCondition(limit, used+max(limit/50, 4) >= limit, c, condition.Problem{
		Severity: condition.Severe, What: "the agent has no free descriptors", Evidence: fmt.Sprintf("%d of at most %d are open", used, limit),
		Effect: "when none is free, queries over TCP and queries that need a new socket to a nameserver fail",
		Mend:   "raise LimitNOFILE= of nametap.service", Rows: []string{"R3"},
	})
}

// ConntrackCondition returns the condition of connection tracking: at most 1 % of its entries are free.
func ConntrackCondition() condition.Condition {
	used, limit := conntrack.Usage()
	c := condition.Condition{Code: condition.ConntrackFull, Title: "connection tracking has room"}
	return resourceCondition(limit, used+limit/100 >= limit, c, condition.Problem{
		Severity: condition.Severe, What: "the connection tracking of the kernel is full",
		Evidence: fmt.Sprintf("it has %d entries, and net.netfilter.nf_conntrack_max is %d", used, limit),
		Effect:   "when no entry is free, the kernel drops new flows, also the flows of DNS queries", Rows: []string{"K21"},
		Mend: fmt.Sprintf("raise net.netfilter.nf_conntrack_max: sysctl -w net.netfilter.nf_conntrack_max=%d; conntrack -L shows what opens so many flows", 2*limit),
	})
}

// openFiles is the directory with a file for each open descriptor. Since Linux 6.2, the size of the directory is the
// number of descriptors.
const openFiles = "/proc/self/fd"

// descriptors returns how many descriptors the process has open, and how many it may have.
func descriptors() (used, limit uint64) {
	var most unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &most) != nil {
		return 0, 0
	}
	if info, err := os.Stat(openFiles); err == nil && info.Size() > 0 {
		return uint64(info.Size()), most.Cur //nolint:gosec // positive
	}
	files, err := os.ReadDir(openFiles)
	switch {
	case err == nil:
		return uint64(len(files)), most.Cur
	case listen.OutOfDescriptors(err):
		return most.Cur, most.Cur
	}
	return 0, 0
}

// Describe implements [prometheus.Collector].
func (d *diagnosis) Describe(metrics chan<- *prometheus.Desc) { metrics <- problemDesc() }

// Collect makes a metric for each code that any problem has: the number of problems with this code. If there is no
// problem, it makes one metric with the code none. A metric for every code would be too many series for thousands of
// agents.
func (d *diagnosis) Collect(metrics chan<- prometheus.Metric) {
	counts := map[condition.Code]int{}
	for _, p := range d.problems() {
		counts[p.Code]++
	}
	if len(counts) == 0 {
		counts["none"] = 0
	}
	for code, count := range counts {
		metrics <- prometheus.MustNewConstMetric(problemDesc(), prometheus.GaugeValue, float64(count), string(code))
	}
}

func problemDesc() *prometheus.Desc {
	return prometheus.NewDesc("nametap_problem", "Problems that the agent has found, by code.", []string{"code"}, nil)
}
