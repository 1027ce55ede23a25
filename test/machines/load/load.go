package load

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// A Config describes a load.
type Config struct {
	// Server is the nameserver that is queried.
	Server netip.AddrPort
	// Rate is the number of queries a second.
	Rate int
	// For is the time after which [Run] stops sending; 0 is until its context ends.
	For time.Duration
	// TCP is the share of queries over TCP, each over a new connection.
	TCP float64
	// Kept is the share of queries from a few sockets that stay open as long as the load.
	// These sockets are not connected, like musl's. All other queries over UDP have a
	// connected socket of their own, as from glibc.
	Kept float64
	// Timeout is the time after which a query without an answer is lost; 0 is 5 s, as in
	// glibc.
	Timeout time.Duration
	// Expect says what is asked, and which answers are right.
	Expect *Expectation
	// Seed determines the order of questions and transports.
	Seed uint64
	// Enter calls f in the place where the sockets are to be opened, such as the method
	// Run of a netns.NS. nil calls f.
	Enter func(f func())
	// OnBad, unless nil, is called for every query without a right answer. It must be quick,
	// and safe for concurrent use.
	OnBad func(kind Kind, query Example)
}

// lateAfter is the latency after which an answer is counted as late.
const lateAfter = time.Second

// defaultTimeout is the timeout of a query in glibc's resolver.
const defaultTimeout = 5 * time.Second

// A Load is a running load. Its methods are safe for concurrent use.
type Load struct {
	config  Config
	windows windows
	tally   tally
	stop    context.CancelFunc
	done    chan struct{}      // closed when the last query has an answer or is lost
	flights sync.WaitGroup     // queries with a goroutine of their own
	closing context.Context    // ends when the kept sockets are to be closed
	close   context.CancelFunc // ends closing
}

// Start starts a load that runs until Stop.
func Start(config Config) (*Load, error) {
	switch {
	case !config.Server.IsValid():
		return nil, errors.New("starting a load: there is no server")
	case config.Rate <= 0:
		return nil, errors.New("starting a load: the rate must be above 0")
	case config.Expect == nil:
		return nil, errors.New("starting a load: there is no expectation")
	}
	if err := config.Expect.validate(); err != nil {
		return nil, err
	}
	if config.Timeout == 0 {
		config.Timeout = defaultTimeout
	}
	if config.Enter == nil {
		config.Enter = func(f func()) { f() }
	}
	l := &Load{config: config, done: make(chan struct{})}
	now := time.Now()
	l.windows.set(now, config.Timeout, []*Expectation{config.Expect})
	l.tally.begin(now)
	var sending context.Context
	sending, l.stop = context.WithCancel(context.Background())
	l.closing, l.close = context.WithCancel(context.Background())
	sockets, err := l.openKept()
	if err != nil {
		l.stop()
		l.close()
		return nil, err
	}
	random := rand.New(rand.NewPCG(config.Seed, 0)) //nolint:gosec // a test's choice, to be repeated by its seed
	go func() {
		defer close(l.done)
		config.Enter(func() { l.send(sending, random, sockets) })
		l.tally.sent(time.Now())
		l.flights.Wait()
		l.close()
		for _, s := range sockets {
			s.end()
		}
	}()
	return l, nil
}

// Run runs a load for the configured time, or until ctx ends. It returns when the last query
// has an answer or is lost.
func Run(ctx context.Context, config Config) (Report, error) {
	l, err := Start(config)
	if err != nil {
		return Report{}, err
	}
	if config.For > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, config.For)
		defer cancel()
	}
	<-ctx.Done()
	return l.Stop(), nil
}

// Expect changes what is expected from now on. An answer is right if it is right for any of
// the expectations. The last one has the questions.
func (l *Load) Expect(expectations ...*Expectation) error {
	for _, e := range expectations {
		if err := e.validate(); err != nil {
			return err
		}
	}
	l.windows.set(time.Now(), l.config.Timeout, expectations)
	return nil
}

// Report returns the report of all queries so far, except queries in flight.
func (l *Load) Report() Report { return l.tally.report(l.config) }

// Cut returns the report since the previous Cut, or since the start. A query belongs to the
// report of the time when it ended.
func (l *Load) Cut() Report { return l.tally.cut(l.config) }

// Stop stops sending, waits until the last query has an answer or is lost, and returns the
// report of the whole load. Later calls return the same.
func (l *Load) Stop() Report {
	l.stop()
	<-l.done
	return l.Report()
}
