// Package querylog logs queries in few lines: one for each suffix and reason, with a count.
//
//	querylog.go  Run: from the queries to the log
//	summary.go   what the lines have, and when they are due
//
// The first line about a suffix and a reason comes a second after the first query, and the next one a minute later, with
// what there was meanwhile. There is at most one line a second, whatever clients ask.
package querylog

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// A Mode says which queries are logged.
type Mode string

// The modes.
const (
	// Off logs none.
	Off Mode = "off"
	// Failed logs the queries of the kind [seen.Failure]: queries without an answer, or with a stale
	// one. Other queries cost nothing. It is the default.
	Failed Mode = "failed"
	// All logs all queries.
	All Mode = "all"
)

// MarshalText returns what UnmarshalText reads.
func (m Mode) MarshalText() ([]byte, error) { return []byte(m), nil }

// UnmarshalText reads one of the modes. The error says what was expected.
func (m *Mode) UnmarshalText(text []byte) error {
	switch v := Mode(text); v {
	case Off, Failed, All:
		*m = v
		return nil
	}
	return fmt.Errorf("want %s, %s or %s", Off, Failed, All)
}

// Filter returns the filter of the queries that a mode logs.
func (m Mode) Filter() *seen.Filter {
	if m == All {
		return seen.All()
	}
	return seen.Failures()
}

// Run logs the queries of a reader until ctx ends. It closes the reader. Names below domain, the cluster domain, are
// grouped by namespace.
func Run(ctx context.Context, reader *seen.Reader, domain string, log *slog.Logger) {
	defer reader.Close()
	s := newSummary(domain)
	for ctx.Err() == nil {
		records, lost := next(ctx, reader, s)
		now := time.Now()
		for i := range records {
			s.add(&records[i], now)
		}
		s.addLost(lost, now)
		if l := s.due(now); l != nil {
			l.log(log)
		}
	}
	if l := s.last(); l != nil {
		l.log(log)
	}
}

// next waits for queries until a line is due.
func next(ctx context.Context, reader *seen.Reader, s *summary) (records []seen.Record, lost uint64) {
	if at, waiting := s.next(); waiting {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, at)
		defer cancel()
	}
	records, lost, _ = reader.Next(ctx) // an error is the end of ctx
	return records, lost
}
