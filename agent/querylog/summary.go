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
	// settleTime is the time from the first query to the first line about its cause.
	settleTime = time.Second
	// repeatTime is the least time between two lines about the same cause.
	repeatTime = time.Minute
	// maxGroups bounds how many causes have a line of their own: a client chooses nameservers that are not configured.
	maxGroups = 7
	// maxSuffixes bounds how many different suffixes are counted.
	maxSuffixes = 1000
)

// A summary counts queries, and makes the lines of the log when they are due.
type summary struct {
	domain string // the cluster domain, without the last dot
	groups map[key]*group
}

func newSummary(domain string) *summary {
	return &summary{domain: strings.TrimSuffix(domain, "."), groups: map[key]*group{}}
}

// add counts a query.
func (s *summary) add(r *seen.Record, now time.Time) {
	k := key{text: textFailed, cause: r.Cause()}
	if r.Source != "stale" && (r.Rcode == "NOERROR" || r.Rcode == "NXDOMAIN") {
		k = key{text: textAnswered, cause: r.Source}
	}
	g := s.group(k, now)
	if g.count == 0 {
		g.client, g.example, g.row, g.suffixes = r.Who(), r.Question(), strings.Join(r.Rows, " "), map[string]bool{}
	}
	g.count++
	if r.Source == "stale" {
		g.stale++
	}
	if len(g.suffixes) < maxSuffixes {
		g.suffixes[suffixOf(r.Name, s.domain)] = true
	}
}

// addLost counts n queries that the reader has missed.
func (s *summary) addLost(n uint64, now time.Time) {
	if n > 0 {
		s.group(key{text: textLost}, now).count += n
	}
}

// group returns the group of k. If there are maxGroups already, it is a group for all other causes.
func (s *summary) group(k key, now time.Time) *group {
	if s.groups[k] == nil && len(s.groups) >= maxGroups {
		for old, g := range s.groups {
			if g.count == 0 && now.Sub(g.logged) >= repeatTime {
				delete(s.groups, old)
			}
		}
		if len(s.groups) >= maxGroups && k.text != textLost {
			k.cause = "other reasons"
		}
	}
	g := s.groups[k]
	if g == nil {
		g = &group{key: k}
		s.groups[k] = g
	}
	if g.count == 0 {
		g.first = now
	}
	return g
}

// next returns when the next line is due. If nothing was counted since the last lines, waiting is false.
func (s *summary) next() (t time.Time, waiting bool) {
	for _, g := range s.groups {
		if due := g.due(); g.count > 0 && (!waiting || due.Before(t)) {
			t, waiting = due, true
		}
	}
	return t, waiting
}

// log logs the lines that are due. At the end, all lines are due but those of answered queries.
func (s *summary) log(log *slog.Logger, now time.Time, end bool) {
	for _, g := range s.groups {
		if g.count > 0 && (end && g.text != textAnswered || !g.due().After(now)) {
			g.log(log)
			g.count, g.stale, g.logged = 0, 0, now
		}
	}
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

// A group counts the queries with one key since the last line about them.
type group struct {
	key
	count    uint64
	stale    uint64          // how many of them got a stale answer
	suffixes map[string]bool // of their names
	client   string          // the client of the first query
	example  string          // the question of the first query
	row      string          // the rows of docs/behaviour.md of the first query
	first    time.Time       // when the first query was counted
	logged   time.Time       // when the last line was logged
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
	if g.text != textLost {
		attrs = append(attrs, slog.Int("suffixes", len(g.suffixes)), slog.String("reason", g.cause))
	}
	for _, attr := range []slog.Attr{
		slog.String("row", g.row), slog.String("first_client", g.client), slog.String("example", g.example),
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
