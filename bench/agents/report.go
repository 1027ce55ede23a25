package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/report"
)

// A figure is a measured quantity.
type figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// figures are the figures of an experiment with one control plane.
type figures struct {
	Experiment string   `json:"experiment"`
	Plane      string   `json:"plane"`
	Figures    []figure `json:"figures"`
}

// add adds a figure.
func (f *figures) add(name string, value float64) {
	f.Figures = append(f.Figures, figure{name, value})
}

// addTimes adds percentiles.
func (f *figures) addTimes(name string, t fleet.Times) {
	if len(t) == 0 {
		return
	}
	for _, q := range []struct {
		name  string
		share float64
	}{{"p50", 0.5}, {"p99", 0.99}, {"longest", 1}} {
		f.add(fmt.Sprintf("%s, %s, ms", name, q.name), milliseconds(t.Quantile(q.share)))
	}
}

// value returns a figure; ok is false if there is none of the name.
func (f *figures) value(name string) (value float64, ok bool) {
	for _, one := range f.Figures {
		if one.Name == name {
			return one.Value, true
		}
	}
	return 0, false
}

// reported has all figures of a run.
type reported struct {
	Began   time.Time  `json:"began"`
	Title   string     `json:"title"`
	Results []*figures `json:"results"`
}

// newReport returns a report without figures.
func newReport(o options) *reported {
	transport := "plaintext"
	if o.tls {
		transport = "TLS"
	}
	title := fmt.Sprintf("%s agents, %s hosts in %d namespaces, %s", report.Thousands(o.agents), report.Thousands(o.hosts), o.namespaces, transport)
	if len(o.targets) > 0 {
		title = fmt.Sprintf("%s agents, %s", report.Thousands(o.agents), transport)
	}
	return &reported{Began: time.Now(), Title: title}
}

// figures adds an experiment to the report.
func (s *stage) figures(experiment string) *figures {
	f := &figures{Experiment: experiment, Plane: s.name}
	s.report.Results = append(s.report.Results, f)
	return f
}

// print prints the report, and writes the file that o names.
func (r *reported) print(o options) error {
	for _, t := range r.tables() {
		fmt.Print(t.Text())
	}
	if o.json == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("writing figures: %w", err)
	}
	if err := os.WriteFile(o.json, append(text, '\n'), 0o644); err != nil { // readable for every user
		return fmt.Errorf("writing figures: %w", err)
	}
	return nil
}

// tables returns a table for each experiment, with a column for each control plane. For each
// control plane but the first, a further column has the first one's figure divided by its figure.
func (r *reported) tables() []report.Table {
	var all []report.Table
	byName := map[string][]*figures{}
	var order []string
	for _, f := range r.Results {
		if byName[f.Experiment] == nil {
			order = append(order, f.Experiment)
		}
		byName[f.Experiment] = append(byName[f.Experiment], f)
	}
	for _, name := range order {
		all = append(all, table(r.Title+": "+name, byName[name]))
	}
	return all
}

// table returns the table of an experiment.
func table(title string, planes []*figures) report.Table {
	first := planes[0]
	t := report.Table{Title: title, Header: []string{"figure", first.Plane}}
	for _, p := range planes[1:] {
		t.Header = append(t.Header, p.Plane, first.Plane+" ÷ "+p.Plane)
	}
	for _, one := range first.Figures {
		row := []string{one.Name, cell(one.Value)}
		for _, p := range planes[1:] {
			value, ok := p.value(one.Name)
			if !ok {
				row = append(row, "–", "–")
				continue
			}
			ratio := "–"
			if value != 0 {
				ratio = report.Cell(one.Value / value)
			}
			row = append(row, cell(value), ratio)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// cell formats a value; whole numbers have no decimals.
func cell(v float64) string {
	return strings.TrimSuffix(report.Cell(v), ".00")
}
