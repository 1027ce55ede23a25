package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Patience is how long a client of an experiment waits for an answer: longer than
// any resolver, to see answers that come too late for resolvers.
const Patience = 12 * time.Second

// An Answer is the result of one query.
type Answer struct {
	Reply *dns.Msg // nil if Err is not nil
	Err   error
	// sent is the time when the query was sent, took the time until the answer.
	sent time.Time
	took time.Duration
}

// Failed reports whether there is no answer, or a failure. NXDOMAIN is an answer.
func (a Answer) Failed() bool {
	return a.Err != nil || a.Reply.Rcode != dns.RcodeSuccess && a.Reply.Rcode != dns.RcodeNameError
}

// Outcome is the response code or the error.
func (a Answer) Outcome() string {
	if a.Err != nil {
		return a.Err.Error()
	}
	return dns.RcodeToString[a.Reply.Rcode]
}

// Ask sends one query over UDP, once.
func Ask(ctx context.Context, addr netip.AddrPort, query *dns.Msg, wait time.Duration) Answer {
	client := dns.Client{Timeout: wait}
	began := time.Now()
	reply, _, err := client.ExchangeContext(ctx, query, addr.String())
	return Answer{Reply: reply, Err: err, sent: began, took: time.Since(began)}
}

// SteadyRate is in queries per second.
const SteadyRate = 100

// AskSteadily sends n queries at SteadyRate, without waiting for answers, and returns the
// results in order. name returns the name of the i-th query.
func AskSteadily(ctx context.Context, addr netip.AddrPort, n int, name func(i int) string) []Answer {
	answers := make([]Answer, n)
	ticker := time.NewTicker(time.Second / SteadyRate)
	defer ticker.Stop()
	var asking sync.WaitGroup
	for i := range answers {
		asking.Go(func() {
			answers[i] = Ask(ctx, addr, new(dns.Msg).SetQuestion(name(i), dns.TypeA), Patience)
		})
		select {
		case <-ticker.C:
		case <-ctx.Done():
			asking.Wait()
			return answers[:i+1]
		}
	}
	asking.Wait()
	return answers
}

// Latencies returns the sorted times of answers and failures.
func Latencies(answers []Answer) []time.Duration {
	var took []time.Duration
	for _, a := range answers {
		took = append(took, a.took)
	}
	slices.Sort(took)
	return took
}

// Quantile returns the time that a share q of the sorted times does not exceed, or 0
// without times.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Failures counts answers that failed.
func Failures(answers []Answer) int {
	n := 0
	for _, a := range answers {
		if a.Failed() {
			n++
		}
	}
	return n
}

// Distinct returns a function that returns the name of the i-th query of a series. Each i
// has another name.
func Distinct(series string) func(i int) string {
	return func(i int) string { return fmt.Sprintf("q%06d.%s.%s", i, series, ExternalDomain) }
}
