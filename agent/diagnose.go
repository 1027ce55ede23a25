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

	"github.com/nametap/nametap/internal/cgroup"
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
		conditions := slices.Concat(resourceConditions(), d.listening(silent), c.proxy.Conditions(), c.client.Conditions(), c.capture.conditions(), c.guardConditions())
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

// A resource says how much of a resource is in use, and how much may be in use. A limit of 0 means that there is no
// limit, or that it is not known.
type resource struct{ used, limit uint64 }

// full reports whether little of the resource is left: at most the part 1/share of the limit, or at most free.
func (r resource) full(share, free uint64) bool {
	return r.limit > 0 && r.used+max(r.limit/share, free) >= r.limit
}

// condition returns c with the problem p if the resource is full.
func (r resource) condition(full bool, c condition.Condition, p condition.Problem) condition.Condition {
	switch {
	case r.limit == 0:
		c.Unknown = "there is no limit, or it cannot be read"
	case full:
		c.Problems = []condition.Problem{p}
	}
	return c
}

// resourceConditions returns the conditions of resources that can run out.
func resourceConditions() []condition.Condition {
	files, bytes := descriptors(), cgroupMemory()
	return []condition.Condition{
		ConntrackCondition(),
		files.condition(files.full(50, 4), condition.Condition{Code: condition.Descriptors, Title: "the agent has free descriptors"}, condition.Problem{
			Severity: condition.Severe, What: "the agent has no free descriptors", Evidence: fmt.Sprintf("%d of at most %d are open", files.used, files.limit),
			Effect: "when none is free, queries over TCP and queries that need a new socket to a nameserver fail",
			Mend:   "raise LimitNOFILE= of nametap.service", Rows: []string{"R3"},
		}),
		bytes.condition(bytes.full(20, 0), condition.Condition{Code: "memory", Title: "the agent has free memory"}, condition.Problem{
			Severity: condition.Minor, What: "the memory of the agent is nearly at its limit",
			Evidence: fmt.Sprintf("%d of %d MiB, without what the kernel can free", bytes.used>>20, bytes.limit>>20),
			Effect:   "none yet; at the limit the kernel kills the agent", Rows: []string{"R15"},
			Mend: "raise the limit (MemoryMax= of nametap.service, resources.limits.memory of the container), or lower --cache-size",
		}),
	}
}

// ConntrackCondition returns the condition of connection tracking: at most 1 % of its entries are free.
func ConntrackCondition() condition.Condition {
	used, limit := conntrack.Usage()
	table := resource{used, limit}
	c := condition.Condition{Code: condition.ConntrackFull, Title: "connection tracking has room"}
	return table.condition(table.full(100, 0), c, condition.Problem{
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
func descriptors() resource {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) != nil {
		return resource{}
	}
	if info, err := os.Stat(openFiles); err == nil && info.Size() > 0 {
		return resource{uint64(info.Size()), limit.Cur} //nolint:gosec // positive
	}
	files, err := os.ReadDir(openFiles)
	switch {
	case err == nil:
		return resource{uint64(len(files)), limit.Cur}
	case listen.OutOfDescriptors(err):
		return resource{limit.Cur, limit.Cur}
	}
	return resource{}
}

// cgroupMemory returns how much memory the cgroup of this process uses, without memory that the kernel can free,
// and the limit.
func cgroupMemory() resource {
	used, limit := cgroup.Memory("/")
	return resource{uint64(used), uint64(limit)} //nolint:gosec // not negative
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
