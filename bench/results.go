package main

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// results are all results of a run.
type results struct {
	Machine machine
	Hosts   int
	Rounds  int
	Seconds int
	// Servers are in the order of the tables.
	Servers []*serverResults
	Push    *pushResults
	// Tables are the results of experiments.
	Tables []report.Table
	// LeftOut has the reason for each server that could not be measured.
	LeftOut map[string]string
	Notes   []string
}

// serverResults are the figures of one server.
type serverResults struct {
	Name    string
	Title   string
	Version string
	Figures report.Figures
	// OverEcho are the figures divided by the echo's in the same round.
	OverEcho report.Figures
}

// machine describes the machine of the figures.
type machine struct {
	Processor string
	Cores     int
	Kernel    string
	Go        string
}

// newResults returns results without figures. They describe the machine and the options.
func newResults(o options) *results {
	return &results{
		Machine: thisMachine(), Hosts: o.hosts, Rounds: o.rounds, Seconds: o.seconds,
		LeftOut: map[string]string{}, Notes: []string{},
	}
}

// thisMachine reads the description of the machine from the kernel. Fields that the kernel
// does not report stay empty.
func thisMachine() machine {
	m := machine{Cores: runtime.NumCPU(), Go: runtime.Version()}
	if text, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(text))
	}
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m
	}
	for line := range strings.Lines(string(text)) {
		if label, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(label) == "model name" {
			m.Processor = strings.TrimSpace(value)
			break
		}
	}
	return m
}

// add makes room for the figures of s.
func (r *results) add(s *lab.Server) {
	r.Servers = append(r.Servers, &serverResults{
		Name: s.Name, Title: s.Title, Version: s.Version, Figures: report.Figures{},
	})
}

// server returns the results of a server, or nil.
func (r *results) server(name string) *serverResults {
	for _, s := range r.Servers {
		if s.Name == name {
			return s
		}
	}
	return nil
}

// of returns the figures of a server, or none if it was not measured.
func (r *results) of(name string) report.Figures {
	if s := r.server(name); s != nil {
		return s.Figures
	}
	return nil
}

// note adds a note to the report.
func (r *results) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// compare divides the figures of all servers by the echo's.
func (r *results) compare() {
	echo := r.of(lab.EchoName)
	for _, s := range r.Servers {
		s.OverEcho = report.Figures{}
		for _, name := range []string{udpMicros, pacedMicros, latencyP50, latencyP99} {
			if len(s.Figures[name]) > 0 {
				s.OverEcho[name] = s.Figures[name].Over(echo[name])
			}
		}
	}
}

// chart draws the processor time of one query, the cheapest server first, as SVG.
func (r *results) chart() string {
	var bars []report.Bar
	for _, s := range r.Servers {
		if v := s.Figures[udpMicros].Median(); !math.IsNaN(v) {
			bars = append(bars, report.Bar{Label: s.Title, Value: v, Own: s.Name == lab.AgentName})
		}
	}
	slices.SortStableFunc(bars, func(a, b report.Bar) int { return cmp.Compare(a.Value, b.Value) })
	subtitle := fmt.Sprintf("µs, lower is better; UDP, one core, %s hosts; %s", report.Thousands(r.Hosts), r.Machine.Processor)
	return report.DrawBars("Processor time of one DNS query", subtitle, bars)
}
