package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// tables returns the results as tables.
func (r *results) tables() []report.Table {
	all := slices.Clone(r.Tables)
	if len(r.Servers) > 0 {
		all = append(all, r.serverTable())
	}
	if len(r.of(lab.AgentName)) > 0 {
		all = append(all, r.mixTable())
	}
	if r.Push != nil {
		all = append(all, r.Push.table())
	}
	return all
}

// serverTable compares the servers.
func (r *results) serverTable() report.Table {
	t := report.Table{
		Title: fmt.Sprintf("One query, medians of %d rounds of %d s, %s hosts", r.Rounds, r.Seconds, report.Thousands(r.Hosts)),
		Header: []string{
			"server", "µs/query", "× echo", "queries/s", "µs at 5,000/s", "× echo",
			"p50 µs", "p99 µs", "TCP µs/query", "TCP queries/s", "MB",
		},
	}
	for _, s := range r.Servers {
		row := []string{strings.TrimSpace(s.Title + " " + shortVersion(s.Version))}
		for _, f := range []report.Figure{
			s.Figures[udpMicros], s.OverEcho[udpMicros], s.Figures[udpRate], s.Figures[pacedMicros], s.OverEcho[pacedMicros],
			s.Figures[latencyP50], s.Figures[latencyP99], s.Figures[tcpMicros], s.Figures[tcpRate], s.Figures[memoryMB],
		} {
			row = append(row, report.Cell(f.Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// shortVersion removes the commit from an untagged version.
func shortVersion(version string) string {
	if base, _, ok := strings.Cut(strings.TrimPrefix(version, "v0.0.0-"), "-"); ok {
		return base
	}
	return version
}

// mixTable compares the kinds of query that the agent answers itself.
func (r *results) mixTable() report.Table {
	t := report.Table{Title: "Kinds of queries, nametap only", Header: []string{"query", "µs/query", "× direct"}}
	own := r.of(lab.AgentName)
	direct := own[mixFigure(lab.Mixes()[0])]
	for _, m := range lab.Mixes() {
		f := own[mixFigure(m)]
		t.Rows = append(t.Rows, []string{m.Name + ": " + m.What, report.Cell(f.Median()), report.Cell(f.Over(direct).Median())})
	}
	return t
}

// table returns the costs of pushes.
func (p *pushResults) table() report.Table {
	t := report.Table{
		Title:  fmt.Sprintf("A push of %s hosts, %.1f MB", report.Thousands(p.Hosts), float64(p.Bytes)/1e6),
		Header: []string{"push", "nametap ms", "receiving ms", "difference ms", "p99 µs, one a second", "shards: nametap ms", "shards: p99 µs", "resident MiB"},
	}
	for _, line := range []struct{ what, cost, p99 string }{
		{"none", "", quietP99},
		{"first", firstPush, ""},
		{"one host changed", onePush, oneP99},
		{"all hosts changed", allPush, allP99},
	} {
		own, sink := p.Figures[line.cost], p.Figures[line.cost+sinkSuffix]
		t.Rows = append(t.Rows, []string{
			line.what, report.Cell(own.Median()), report.Cell(sink.Median()), report.Cell(own.Minus(sink).Median()),
			report.Cell(p.Figures[line.p99].Median()),
			report.Cell(p.Figures[line.cost+shardsSuffix].Median()), report.Cell(p.Figures[line.p99+shardsSuffix].Median()),
			report.Cell(p.Figures[line.cost+residentSuffix].Median()),
		})
	}
	return t
}

// text returns the whole report, as Markdown.
func (r *results) text() string {
	var b strings.Builder
	b.WriteString("\n" + r.circumstances() + "\n\n")
	for _, t := range r.tables() {
		b.WriteString(t.Text())
	}
	b.WriteString(r.remarks())
	return b.String()
}

// circumstances describes the machine, and the versions of its kernel and of Go.
func (r *results) circumstances() string {
	m := r.Machine
	return fmt.Sprintf("%d × %s, Linux %s, %s", m.Cores, m.Processor, m.Kernel, m.Go)
}

// remarks returns the left-out servers and the notes, one line each.
func (r *results) remarks() string {
	var b strings.Builder
	for _, p := range lab.Peers() {
		if reason, ok := r.LeftOut[p.Name]; ok {
			fmt.Fprintf(&b, "- LEFT OUT: %s: %s\n", p.Title, reason)
		}
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "- note: %s\n", note)
	}
	return b.String()
}
