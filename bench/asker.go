package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// patience is how long a client of an experiment waits for an answer: longer than
// any resolver, to see answers that come too late for those.
const patience = 12 * time.Second

// An answer is the result of one query.
type answer struct {
	reply *dns.Msg // nil if err is not
	err   error
	// sent is the time when the query was sent, took the time until the answer.
	sent time.Time
	took time.Duration
}

// failed reports whether there is no answer, or a failure. NXDOMAIN is an answer.
func (a answer) failed() bool {
	return a.err != nil || a.reply.Rcode != dns.RcodeSuccess && a.reply.Rcode != dns.RcodeNameError
}

// outcome is the response code or the error.
func (a answer) outcome() string {
	if a.err != nil {
		return a.err.Error()
	}
	return dns.RcodeToString[a.reply.Rcode]
}

// ask sends one query over UDP, once.
func ask(ctx context.Context, addr netip.AddrPort, query *dns.Msg, wait time.Duration) answer {
	client := dns.Client{Timeout: wait}
	began := time.Now()
	reply, _, err := client.ExchangeContext(ctx, query, addr.String())
	return answer{reply: reply, err: err, sent: began, took: time.Since(began)}
}

// steadyRate is in queries per second.
const steadyRate = 100

// askSteadily sends n queries at steadyRate, without waiting for answers, and returns the
// results in order. name returns the name of the i-th query.
func askSteadily(ctx context.Context, addr netip.AddrPort, n int, name func(i int) string) []answer {
	answers := make([]answer, n)
	ticker := time.NewTicker(time.Second / steadyRate)
	defer ticker.Stop()
	var asking sync.WaitGroup
	for i := range answers {
		asking.Go(func() {
			answers[i] = ask(ctx, addr, new(dns.Msg).SetQuestion(name(i), dns.TypeA), patience)
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

// latencies returns the sorted times of answers and failures.
func latencies(answers []answer) []time.Duration {
	var took []time.Duration
	for _, a := range answers {
		took = append(took, a.took)
	}
	slices.Sort(took)
	return took
}

// quantile returns the time that a share q of the sorted times does not exceed, or 0
// without times.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// failures counts answers that failed.
func failures(answers []answer) int {
	n := 0
	for _, a := range answers {
		if a.failed() {
			n++
		}
	}
	return n
}

// distinct returns a name for the i-th query of a series, different in each call.
func distinct(series string) func(i int) string {
	return func(i int) string { return fmt.Sprintf("q%06d.%s.%s", i, series, externalDomain) }
}
