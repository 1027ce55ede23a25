package test

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A load is a set of applications on a VM that send 1,000 queries per second, half of them
// over each family. It counts the answers.
type load struct {
	began time.Time
	stop  chan struct{}
	done  sync.WaitGroup

	mu      sync.Mutex
	answers map[string]int // by their address, or by the error
	slowest time.Duration
}

// loadRate is queries per second.
const loadRate = 1000

// load starts a load. Each family has three applications that keep their socket, one that
// opens a new socket for every query, and one that uses TCP.
func (v *vm) load() *load {
	l := &load{began: time.Now(), stop: make(chan struct{}), answers: map[string]int{}}
	const each = 5
	for _, server := range []string{named, named6} {
		for n := range each {
			l.done.Go(func() {
				v.Run(func() { l.ask(net.JoinHostPort(server, "53"), n, 2*each*time.Second/loadRate) })
			})
		}
	}
	v.tb.Cleanup(func() { l.end() })
	return l
}

// ask runs one application, the nth of its family.
func (l *load) ask(server string, n int, interval time.Duration) {
	network := "udp"
	if n == 4 {
		network = "tcp"
	}
	var conn *dns.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close() // no more queries follow
		}
	}()
	for i := 0; ; i++ {
		select {
		case <-l.stop:
			return
		case <-time.After(time.Until(l.began.Add(time.Duration(i) * interval))): // late queries are sent without a pause
		}
		name := mesh
		if i%2 == 1 {
			name = fmt.Sprintf("%d.%d.example.org", n, i) // in no cache
		}
		if conn != nil && n >= 3 {
			_ = conn.Close() // no reply is awaited
			conn = nil
		}
		began := time.Now()
		address, err := "", error(nil)
		if conn == nil {
			conn, err = dns.DialTimeout(network, server, 5*time.Second)
		}
		if err == nil {
			address, err = askOn(conn, name)
		}
		if i%2 == 1 {
			address += " forwarded"
		}
		l.note(address, time.Since(began), err)
	}
}

// note counts the answer or the error of a query.
func (l *load) note(address string, took time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slowest = max(l.slowest, took)
	if err != nil {
		address = fmt.Sprintf("lost%s after %v: %v", address, time.Since(l.began).Round(time.Millisecond), err)
	}
	l.answers[address]++
}

// of returns the number of answers with an address.
func (l *load) of(address string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answers[address]
}

// more waits for more answers with an address.
func (v *vm) more(l *load, address string) {
	v.tb.Helper()
	want := l.of(address) + 100
	wait.Until(v.tb, "queries are answered with "+address, func() bool { return l.of(address) >= want })
}

// end ends the load. It may be called more than once.
func (l *load) end() map[string]int {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.done.Wait()
	return l.answers
}

// noneLost ends the load and fails the test if a query was lost or wrongly answered.
func (v *vm) noneLost(l *load) {
	v.tb.Helper()
	took := time.Since(l.began)
	answers := l.end()
	total := 0
	for _, n := range answers {
		total += n
	}
	v.tb.Logf("%d queries, %.0f a second, the slowest in %v: %v", total, float64(total)/took.Seconds(), l.slowest, answers)
	for _, address := range slices.Collect(maps.Keys(answers)) {
		if address != meshIP && address != namedIP && address != namedIP+" forwarded" {
			v.tb.Errorf("%d queries: %s", answers[address], address)
		}
	}
}
