package load

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// A Kind is how a query ended.
type Kind string

// The kinds. Every query has one of them.
const (
	Right       Kind = "right"       // an expected answer
	Wrong       Kind = "wrong"       // an answer that was not expected
	Foreign     Kind = "foreign"     // an answer of another server than the agent: see Expectation.Foreign
	Failed      Kind = "failed"      // SERVFAIL where it was not expected
	Unreachable Kind = "unreachable" // refused by the kernel: no process listens
	Lost        Kind = "lost"        // no answer within the timeout
	Unsent      Kind = "unsent"      // the load itself could not send it
)

// Kinds returns all kinds.
func Kinds() []Kind { return []Kind{Right, Wrong, Foreign, Failed, Unreachable, Lost, Unsent} }

// A Transport is how a query was sent.
type Transport string

// The transports.
const (
	UDP     Transport = "udp"      // from a connected socket of its own
	UDPKept Transport = "udp-kept" // from a socket that many queries use
	TCP     Transport = "tcp"      // over a connection of its own
)

// A Report says how queries ended.
type Report struct {
	Server netip.AddrPort `json:"server"`
	Began  time.Time      `json:"began"`
	Ended  time.Time      `json:"ended"`
	// Queries is the number of queries that have ended, Rate their number a second.
	Queries int     `json:"queries"`
	Rate    float64 `json:"rate"`
	// Counts are the numbers of queries by kind, Transports by transport and kind.
	Counts     map[Kind]int               `json:"counts"`
	Transports map[Transport]map[Kind]int `json:"transports"`
	// Late is the number of right answers that took more than a second.
	Late int `json:"late"`
	// Stray is the number of packets that answered no query in flight: a wrong ID, source
	// or question, or a second answer.
	Stray int `json:"stray"`
	// LongestGap is the longest time without a right answer, which began at GapBegan.
	LongestGap time.Duration `json:"longest_gap_ns"`
	GapBegan   time.Time     `json:"gap_began"`
	// Latency of right answers.
	Latency Latency `json:"latency"`
	// Lag is the longest time that a query was sent too late, because the load itself did
	// not get the processor.
	Lag time.Duration `json:"lag_ns"`
	// Examples are the first queries of each kind except Right, and the first late ones
	// (under "late") and stray packets ("stray").
	Examples map[Kind][]Example `json:"examples,omitempty"`
}

// A Latency has percentiles, each exact to 3 %, and the exact maximum.
type Latency struct {
	P50  time.Duration `json:"p50_ns"`
	P90  time.Duration `json:"p90_ns"`
	P99  time.Duration `json:"p99_ns"`
	P999 time.Duration `json:"p999_ns"`
	Max  time.Duration `json:"max_ns"`
}

// An Example is a query that ended badly.
type Example struct {
	Sent      time.Time     `json:"sent"`
	Took      time.Duration `json:"took_ns"`
	Name      string        `json:"name"`
	Transport Transport     `json:"transport"`
	Detail    string        `json:"detail"`
}

// The keys of Report.Examples that are not kinds of queries.
const (
	late  Kind = "late"
	stray Kind = "stray"
)

// Count returns the number of queries of some kinds.
func (r Report) Count(kinds ...Kind) int {
	n := 0
	for _, kind := range kinds {
		n += r.Counts[kind]
	}
	return n
}

// Bad returns the number of queries without a right answer.
func (r Report) Bad() int { return r.Queries - r.Counts[Right] }

// String returns the report as some lines of text.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d queries in %v (%.0f/s):", r.Queries, r.Ended.Sub(r.Began).Round(time.Millisecond), r.Rate)
	for _, kind := range Kinds() {
		if n := r.Counts[kind]; n > 0 || kind == Right {
			fmt.Fprintf(&b, " %d %s", n, kind)
		}
	}
	fmt.Fprintf(&b, ", %d late, %d stray; longest gap %v at %s; latency p50 %v p99 %v p99.9 %v max %v; lag of the load %v",
		r.Late, r.Stray, r.LongestGap, r.GapBegan.Format(clock), r.Latency.P50, r.Latency.P99, r.Latency.P999, r.Latency.Max, r.Lag)
	for _, kind := range append(Kinds(), late, stray) {
		for _, e := range r.Examples[kind] {
			fmt.Fprintf(&b, "\n\t%s: %s", kind, e)
		}
	}
	return b.String()
}

// clock is the format of times in text.
const clock = "15:04:05.000"

// String returns the example as one line of text.
func (e Example) String() string {
	return fmt.Sprintf("%s +%v %s %s %s", e.Sent.Format(clock), e.Took.Round(time.Microsecond), e.Transport, e.Name, e.Detail)
}
