package main

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A table is rows of cells below a header. The first column is text, the others
// are numbers.
type table struct {
	title  string
	header []string
	rows   [][]string
}

// MarshalJSON writes the cells as text.
func (t table) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"title": t.title, "header": t.header, "rows": t.rows})
}

// text aligns the columns with spaces.
func (t table) text() string {
	widths := make([]int, len(t.header))
	lines := append([][]string{t.header}, t.rows...)
	for _, cells := range lines {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	b.WriteString(t.title + "\n\n")
	for _, cells := range lines {
		var line strings.Builder
		for i, cell := range cells {
			fill := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString("  " + cell + fill)
			} else {
				line.WriteString("  " + fill + cell)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String() + "\n"
}

// markdown returns the table as Markdown.
func (t table) markdown() string {
	row := func(cells []string) string {
		escaped := make([]string, len(cells))
		for i, cell := range cells {
			escaped[i] = strings.ReplaceAll(cell, "|", `\|`)
		}
		return "| " + strings.Join(escaped, " | ") + " |\n"
	}
	var b strings.Builder
	b.WriteString(t.title + "\n\n" + row(t.header))
	b.WriteString("|---|" + strings.Repeat("---:|", len(t.header)-1) + "\n")
	for _, cells := range t.rows {
		b.WriteString(row(cells))
	}
	return b.String() + "\n"
}

// cell formats a number with its significant digits, and NaN as a dash.
func cell(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case math.Abs(v) < 10:
		return fmt.Sprintf("%.2f", v)
	case math.Abs(v) < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return thousands(int(math.Round(v)))
}

// thousands writes n with commas.
func thousands(n int) string {
	if n < 0 {
		return "-" + thousands(-n)
	}
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

// tables returns the results as tables.
func (r *results) tables() []table {
	all := slices.Clone(r.Tables)
	if len(r.Servers) > 0 {
		all = append(all, r.serverTable())
	}
	if len(r.of(agentName)) > 0 {
		all = append(all, r.mixTable())
	}
	if r.Push != nil {
		all = append(all, r.Push.table())
	}
	return all
}

// serverTable compares the servers.
func (r *results) serverTable() table {
	t := table{
		title: fmt.Sprintf("One query, medians of %d rounds of %d s, %s hosts", r.Rounds, r.Seconds, thousands(r.Hosts)),
		header: []string{
			"server", "µs/query", "× echo", "queries/s", "µs at 5,000/s", "× echo",
			"p50 µs", "p99 µs", "TCP µs/query", "TCP queries/s", "MB",
		},
	}
	for _, s := range r.Servers {
		row := []string{strings.TrimSpace(s.Title + " " + shortVersion(s.Version))}
		for _, f := range []figure{
			s.Figures[udpMicros], s.OverEcho[udpMicros], s.Figures[udpRate], s.Figures[pacedMicros], s.OverEcho[pacedMicros],
			s.Figures[latencyP50], s.Figures[latencyP99], s.Figures[tcpMicros], s.Figures[tcpRate], s.Figures[memoryMB],
		} {
			row = append(row, cell(f.median()))
		}
		t.rows = append(t.rows, row)
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
func (r *results) mixTable() table {
	t := table{title: "Kinds of queries, nametap only", header: []string{"query", "µs/query", "× direct"}}
	own := r.of(agentName)
	direct := own[mixFigure(mixes()[0])]
	for _, m := range mixes() {
		f := own[mixFigure(m)]
		t.rows = append(t.rows, []string{m.name + ": " + m.what, cell(f.median()), cell(f.over(direct).median())})
	}
	return t
}

// table returns the costs of pushes.
func (p *pushResults) table() table {
	t := table{
		title:  fmt.Sprintf("A push of %s hosts, %.1f MB", thousands(p.Hosts), float64(p.Bytes)/1e6),
		header: []string{"push", "nametap ms", "receiving ms", "difference ms", "p99 µs, one a second"},
	}
	for _, line := range []struct{ what, cost, p99 string }{
		{"none", "", quietP99},
		{"first", firstPush, ""},
		{"one host changed", onePush, oneP99},
		{"all hosts changed", allPush, allP99},
	} {
		own, sink := p.Figures[line.cost], p.Figures[line.cost+sinkSuffix]
		t.rows = append(t.rows, []string{
			line.what, cell(own.median()), cell(sink.median()), cell(own.minus(sink).median()),
			cell(p.Figures[line.p99].median()),
		})
	}
	t.rows = append(t.rows, []string{"MB after them", cell(p.Figures[memoryMB].median()), "", "", ""})
	return t
}

// text returns the whole report for a terminal.
func (r *results) text() string {
	var b strings.Builder
	b.WriteString("\n" + r.circumstances() + "\n\n")
	for _, t := range r.tables() {
		b.WriteString(t.text())
	}
	b.WriteString(r.remarks("  "))
	return b.String()
}

// markdown returns the whole report as Markdown.
func (r *results) markdown() string {
	var b strings.Builder
	b.WriteString(r.circumstances() + "\n\n")
	for _, t := range r.tables() {
		b.WriteString(t.markdown())
	}
	b.WriteString(r.remarks("- "))
	return b.String()
}

// circumstances describes the machine and the versions of the figures.
func (r *results) circumstances() string {
	m := r.Machine
	return fmt.Sprintf("%d × %s, Linux %s, %s", m.Cores, m.Processor, m.Kernel, m.Go)
}

// remarks returns the left-out servers and the notes, one line each.
func (r *results) remarks(bullet string) string {
	var b strings.Builder
	for _, p := range peers() {
		if reason, ok := r.LeftOut[p.name]; ok {
			fmt.Fprintf(&b, "%sLEFT OUT: %s: %s\n", bullet, p.title, reason)
		}
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "%snote: %s\n", bullet, note)
	}
	return b.String()
}
