package querylog

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/seen"
)

const (
	// settleTime is the time from the first query to the first line about its suffix and reason.
	settleTime = time.Second
	// repeatTime is the least time between two lines about the same suffix and reason.
	repeatTime = time.Minute
	// pauseTime is the least time between any two lines.
	pauseTime = time.Second
	// maxGroups bounds how many pairs of suffix and reason are counted separately.
	maxGroups = 60
)

// A summary counts queries, and makes the lines of the log when they are due.
type summary struct {
	domain string // the cluster domain, without the last dot
	groups map[key]*group
	logged time.Time // when the last line was logged
	forgot time.Time // when forget was last called
}

func newSummary(domain string) *summary {
	return &summary{domain: strings.TrimSuffix(domain, "."), groups: map[key]*group{}}
}

// add counts a query.
func (s *summary) add(r *seen.Record, now time.Time) {
	k := key{suffix: suffixOf(r.Name, s.domain), result: r.Rcode, reason: r.Reason}
	switch {
	case r.Source == "stale":
		k.text, k.result = textStale, ""
	case r.Rcode == "NOERROR" || r.Rcode == "NXDOMAIN":
		k.text, k.reason, k.source = textAnswered, "", r.Source
	default:
		k.text = textFailed
	}
	s.count(k, 1, now, r)
}

// addLost counts n queries that the reader has missed.
func (s *summary) addLost(n uint64, now time.Time) {
	if n > 0 {
		s.count(key{text: textLost}, n, now, nil)
	}
}

// next returns when the next line is due. If nothing was counted since the last lines, waiting is false.
func (s *summary) next() (t time.Time, waiting bool) {
	g := s.earliest()
	if g == nil {
		return time.Time{}, false
	}
	t = g.due()
	if after := s.logged.Add(pauseTime); after.After(t) {
		t = after
	}
	return t, true
}

// due returns the line that is due, or nil if none is.
func (s *summary) due(now time.Time) *group {
	t, waiting := s.next()
	if !waiting || t.After(now) {
		return nil
	}
	s.logged = now
	return s.earliest().take(now)
}

// last returns one line for all queries that were counted but not logged, except for answered queries. It returns
// nil if there are none.
func (s *summary) last() (line *group) {
	for _, g := range s.groups {
		switch {
		case g.count == 0 || g.text == textAnswered:
		case line == nil:
			only := *g
			line = &only
		default:
			line = &group{key: key{text: textEnd}, count: line.count + g.count}
		}
	}
	return line
}

// count counts n queries in the group of k. r is one of these queries, or nil if the reader has missed them.
func (s *summary) count(k key, n uint64, now time.Time, r *seen.Record) {
	g := s.groups[k]
	if g == nil && len(s.groups) >= maxGroups && r != nil {
		s.forget(now)
		if len(s.groups) >= maxGroups {
			k = key{text: textFurther}
			g = s.groups[k]
		}
	}
	if g == nil {
		g = &group{key: k}
		s.groups[k] = g
	}
	if g.count == 0 {
		g.first, g.client, g.example, g.row = now, "", "", ""
		if r != nil {
			g.client, g.example, g.row = r.Who(), r.Question(), strings.Join(r.Rows, " ")
		}
	}
	g.count += n
}

// forget removes the groups that have had no query since their last line, if that line is older than repeatTime. It
// does so at most once in pauseTime.
func (s *summary) forget(now time.Time) {
	if now.Sub(s.forgot) < pauseTime {
		return
	}
	s.forgot = now
	for k, g := range s.groups {
		if g.count == 0 && now.Sub(g.logged) >= repeatTime {
			delete(s.groups, k)
		}
	}
}

// earliest returns the group whose line is due first, nil if nothing was counted.
func (s *summary) earliest() (earliest *group) {
	for _, g := range s.groups {
		if g.count > 0 && (earliest == nil || g.due().Before(earliest.due())) {
			earliest = g
		}
	}
	return earliest
}

// suffixOf returns the last two labels of name. If name is below domain, the cluster domain, suffixOf returns domain and
// the two labels before it: namespace.svc.
func suffixOf(name, domain string) string {
	labels, n := dns.SplitDomainName(name), 2
	if domain != "" && dns.IsSubDomain(domain+".", name) {
		n += dns.CountLabel(domain + ".")
	}
	if len(labels) == 0 {
		return "."
	}
	return strings.Join(labels[max(0, len(labels)-n):], ".")
}

// A group counts the queries with one key since the last line about them. A copy of a group is a line of the log.
type group struct {
	key
	count   uint64
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

// take returns a copy of the group as a line, and sets the count of the group to 0.
func (g *group) take(now time.Time) *group {
	line := *g
	g.count, g.logged = 0, now
	return &line
}

// log logs the group as a line.
func (g *group) log(log *slog.Logger) {
	level := slog.LevelWarn
	if g.text == textAnswered {
		level = slog.LevelInfo
	}
	attrs := []slog.Attr{slog.Uint64("count", g.count)}
	for _, attr := range []slog.Attr{
		slog.String("suffix", g.suffix), slog.String("rcode", g.result), slog.String("source", g.source),
		slog.String("reason", g.reason), slog.String("row", g.row),
		slog.String("first_client", g.client), slog.String("example", g.example),
	} {
		if attr.Value.String() != "" {
			attrs = append(attrs, attr)
		}
	}
	log.LogAttrs(context.Background(), level, g.text, attrs...)
}

// A key has the properties that queries must share to be counted in one line.
type key struct {
	text   string // the message
	suffix string
	result string // the response code
	reason string
	source string // where the answers came from, if text is textAnswered
}

// The messages.
const (
	textFailed   = "queries failed"
	textStale    = "queries got stale answers"
	textAnswered = "queries answered"
	textFurther  = "further queries, not told apart: the log has too many suffixes and reasons"
	textEnd      = "queries that failed, got stale answers or are not in the log, counted together at the end"
	textLost     = "queries that are not in the log, since there were too many at once"
)
