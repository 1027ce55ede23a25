// Package querylog logs queries in few lines: one line a minute for each cause, with a count.
//
//	querylog.go  Run: from the queries to the log
//	summary.go   the content of the lines, and when they are due
//
// The first line about a cause is logged a second after the first query. The next line follows a minute later, with the
// queries of that minute. However many names and nameservers clients choose, there are at most ten lines a minute; the
// records of single queries are in package seen.
package querylog

import (
	"context"
	"log/slog"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// A Mode says which queries are logged.
type Mode string

// The modes.
const (
	// Off logs no query.
	Off Mode = "off"
	// Failed logs the queries of the kind [seen.Failure]: queries without an answer, or with a stale answer. Other
	// queries cost nothing. Failed is the default.
	Failed Mode = "failed"
	// All logs all queries.
	All Mode = "all"
)

// Filter returns the filter that selects the queries to log.
func (m Mode) Filter() *seen.Filter {
	if m == All {
		return seen.All()
	}
	return seen.Failures()
}

// Run logs the queries of reader until ctx ends, and then closes reader.
func Run(ctx context.Context, reader *seen.Reader, log *slog.Logger) {
	defer reader.Close()
	s := summary{}
	for ctx.Err() == nil {
		records, lost := next(ctx, reader, s)
		now := time.Now()
		for i := range records {
			s.add(&records[i], now)
		}
		s.addLost(lost, now)
		s.log(log, now, false)
	}
	s.log(log, time.Now(), true)
}

// next waits for queries until a line is due. It returns the queries, if there are any, and how many further queries
// the reader has missed.
func next(ctx context.Context, reader *seen.Reader, s summary) (records []seen.Record, lost uint64) {
	if t, waiting := s.next(); waiting {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, t)
		defer cancel()
	}
	records, lost, _ = reader.Next(ctx) // an error is the end of ctx
	return records, lost
}
