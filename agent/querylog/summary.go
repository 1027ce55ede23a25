package querylog

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

const (
	// settleTime is the time from the first query to the first line about its cause.
	settleTime = time.Second
	// repeatTime is the least time between two lines about the same cause.
	repeatTime = time.Minute
	// maxGroups bounds how many causes have a line of their own: a client chooses nameservers that are not configured.
	maxGroups = 7
)

// A summary counts queries, and makes the lines of the log when they are due.
type summary map[key]*group

// add counts a query.
func (s summary) add(r *seen.Record, now time.Time) {
	k := key{text: textFailed, cause: r.Cause()}
	if r.Source != "stale" && (r.Rcode == "NOERROR" || r.Rcode == "NXDOMAIN") {
		k = key{text: textAnswered, cause: r.Source}
	}
	g := s.group(k, now)
	if g.count == 0 {
		g.client, g.example, g.row = r.Who(), r.Question(), strings.Join(r.Rows, " ")
	}
	g.count++
	if r.Source == "stale" {
		g.stale++
	}
}

// addLost counts n queries that the reader has missed.
func (s summary) addLost(n uint64, now time.Time) {
	if n > 0 {
		s.group(key{text: textLost}, now).count += n
	}
}

// group returns the group of k. If there are maxGroups already, it is a group for all other causes.
func (s summary) group(k key, now time.Time) *group {
	if s[k] == nil && len(s) >= maxGroups {
		for old, g := range s {
			if g.count == 0 && now.Sub(g.logged) >= repeatTime {
				delete(s, old)
			}
		}
		if len(s) >= maxGroups && k.text != textLost {
			k.cause = "other reasons"
		}
	}
	g := s[k]
	if g == nil {
		g = &group{key: k}
		s[k] = g
	}
	if g.count == 0 {
		g.first = now
	}
	return g
}

// next returns when the next line is due. If nothing was counted since the last lines, waiting is false.
func (s summary) next() (t time.Time, waiting bool) {
	for _, g := range s {
		if due := g.due(); g.count > 0 && (!waiting || due.Before(t)) {
			t, waiting = due, true
		}
	}
	return t, waiting
}

// log logs the lines that are due. At the end, all lines are due but those of answered queries.
func (s summary) log(log *slog.Logger, now time.Time, end bool) {
	for _, g := range s {
		if g.count > 0 && (end && g.text != textAnswered || !g.due().After(now)) {
			g.log(log)
			g.count, g.stale, g.logged = 0, 0, now
		}
	}
}

// A group counts the queries with one key since the last line about them.
type group struct {
	key
	count   uint64
	stale   uint64    // how many of them got a stale answer
	client  string    // the client of the first query
	example string    // the question of the first query
	row     string    // the rows of docs/behaviour.md of the first query
	first   time.Time // when the first query was counted
	logged  time.Time // when the last line was logged
}

// due returns when the next line of the group is due.
func (g *group) due() time.Time {
	t := g.first.Add(settleTime)
	if next := g.logged.Add(repeatTime); next.After(t) {
		t = next
	}
	return t
}

// log logs the group as a line.
func (g *group) log(log *slog.Logger) {
	level := slog.LevelWarn
	if g.text == textAnswered {
		level = slog.LevelInfo
	}
	attrs := []slog.Attr{slog.Uint64("count", g.count)}
	if g.stale > 0 {
		attrs = append(attrs, slog.Uint64("stale", g.stale))
	}
	for _, attr := range []slog.Attr{
		slog.String("reason", g.cause), slog.String("row", g.row), slog.String("first_client", g.client), slog.String("example", g.example),
	} {
		if attr.Value.String() != "" {
			attrs = append(attrs, attr)
		}
	}
	log.LogAttrs(context.Background(), level, g.text, attrs...)
}

// A key has the properties that queries must share to be counted in one line.
type key struct {
	text  string // the message
	cause string // see [seen.Record.Cause]; of answered queries, where the answers came from
}

// The messages.
const (
	textFailed   = "queries failed"
	textAnswered = "queries answered"
	textLost     = "queries that are not in the log, since there were too many at once"
)
