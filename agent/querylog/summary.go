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
	// settle is how long further queries are counted before the first line about a suffix and a reason.
	settle = time.Second
	// repeat is the time between two lines about the same suffix and reason.
	repeat = time.Minute
	// pause is the time between two lines.
	pause = time.Second
	// maxGroups bounds how many suffixes and reasons are told apart: as many as there may be lines in a minute.
	maxGroups = 60
)

// A summary counts queries, and says which line is due.
type summary struct {
	domain string // without the last dot
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

// addLost counts queries of which nothing is known.
func (s *summary) addLost(n uint64, now time.Time) {
	if n > 0 {
		s.count(key{text: textLost}, n, now, nil)
	}
}

// next returns when the next line is due, and whether there will be one without further queries.
func (s *summary) next() (at time.Time, waiting bool) {
	g := s.earliest()
	if g == nil {
		return time.Time{}, false
	}
	at = g.due()
	if after := s.logged.Add(pause); after.After(at) {
		at = after
	}
	return at, true
}

// due returns the line that is due, nil if none is.
func (s *summary) due(now time.Time) *group {
	at, waiting := s.next()
	if !waiting || at.After(now) {
		return nil
	}
	s.logged = now
	return s.earliest().take(now)
}

// last returns a line for what was counted and not logged, nil for nothing.
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

// count counts n queries of a key; r is the first of them.
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

// forget removes, once a second, the groups that had no query for so long that the next one may be logged like the first.
func (s *summary) forget(now time.Time) {
	if now.Sub(s.forgot) < pause {
		return
	}
	s.forgot = now
	for k, g := range s.groups {
		if g.count == 0 && now.Sub(g.logged) >= repeat {
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

// suffixOf returns what a line says of a name: its last two labels, and the namespace of a name below the cluster domain.
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

// A group is what was counted since the last line about its key.
type group struct {
	key
	count   uint64
	client  string // of the first query
	example string // its question
	row     string
	first   time.Time // of the first query
	logged  time.Time // when the last line was logged
}

// due returns when the next line of the group is due.
func (g *group) due() time.Time {
	at := g.first.Add(settle)
	if next := g.logged.Add(repeat); next.After(at) {
		at = next
	}
	return at
}

// take returns what was counted, for a line, and resets the counts.
func (g *group) take(now time.Time) *group {
	line := *g
	g.count, g.logged = 0, now
	return &line
}

// log logs a line.
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

// A key is what the queries of a line have in common.
type key struct {
	text   string // the message
	suffix string
	result string // the response code
	reason string
	source string // of answers
}

// The messages.
const (
	textFailed   = "queries failed"
	textStale    = "queries got stale answers"
	textAnswered = "queries answered"
	textFurther  = "further queries, by suffixes and reasons that are too many for the log"
	textEnd      = "further queries failed before the end"
	textLost     = "queries that are not in the log, since there were too many at once"
)
