package test

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A load is a set of applications on a VM that send 500 queries per second, half of them
// over each family. It counts the answers.
type load struct {
	tb    testing.TB
	began time.Time
	stop  chan struct{}
	done  sync.WaitGroup

	mu      sync.Mutex
	answers map[string][]moment // from the query on, by the address in the answer, or by the error
}

const (
	loadRate     = 500              // queries per second
	loadPatience = 15 * time.Second // after which a query is lost
	lost         = "lost: "         // comes before the error of a query
	forwarded    = " forwarded"     // follows the address in an answer to another name than the mesh name
)

// load starts a load. Each family has three applications that keep their socket, one that
// opens a new socket for every query, and one that uses TCP.
func (v *vm) load() *load {
	l := &load{tb: v.tb, began: time.Now(), stop: make(chan struct{}), answers: map[string][]moment{}}
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
			conn, err = dns.DialTimeout(network, server, loadPatience)
		}
		if err == nil {
			address, err = askWithin(loadPatience, conn, name)
		}
		if op := new(net.OpError); errors.As(err, &op) {
			err = op.Err // without the addresses
		}
		if err != nil {
			address = lost + err.Error()
		}
		if i%2 == 1 {
			address += forwarded
		}
		l.mu.Lock()
		l.answers[address] = append(l.answers[address], moment{began, time.Now()})
		l.mu.Unlock()
	}
}

// of returns the number of answers with an address.
func (l *load) of(address string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.answers[address])
}

// more waits for more answers with an address.
func (v *vm) more(l *load, address string) {
	v.tb.Helper()
	want := l.of(address) + 100
	wait.Until(v.tb, "queries are answered with "+address, func() bool { return l.of(address) >= want })
}

// end ends the load, and returns how many queries had each answer, without those that this machine may have caused
// because it stood still: their number is logged. It may be called more than once.
func (l *load) end() map[string]int {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.done.Wait()
	counts := map[string]int{}
	for address, answers := range l.answers {
		counts[address] = len(answers)
		if address == meshIP || address == namedIP+forwarded {
			continue // which is always right
		}
		for _, m := range answers {
			soon := m.from.Add(5 * time.Second) // what comes later has not caused a loss
			if soon.After(m.to) {
				soon = m.to
			}
			if machine.excuses(l.tb, m.from, soon) {
				counts[address]--
				counts["while the machine stood still: "+address]++
			}
		}
	}
	return counts
}

// noneLost ends the load and fails the test if a query was lost or wrongly answered. Nameservers may answer queries for
// the mesh name only if they may answer some of them.
func (v *vm) noneLost(l *load, namedMay bool) {
	v.tb.Helper()
	answers := l.end()
	v.tb.Logf("queries by their answers: %v", answers)
	for address, n := range answers {
		right := address == meshIP || address == namedIP+forwarded || address == namedIP && namedMay
		if n > 0 && !right && !strings.HasPrefix(address, "while ") {
			v.tb.Errorf("%d queries: %s", n, address)
		}
	}
}
