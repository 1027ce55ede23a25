package main

import (
	"encoding/xml"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"
)

// exampleResults has an echo and an agent, and no figures of Istio.
func exampleResults() *results {
	r := newResults(options{hosts: 10_000, rounds: 2, seconds: 1})
	r.Machine.Processor = `A <"fast"> & small one`
	for name, micros := range map[string]float64{lab.EchoName: 5, lab.AgentName: 10} {
		s := &lab.Server{Peer: lab.Peer{Name: name, Title: name + " <&>"}}
		r.add(s)
		for round := range 2 {
			r.of(name).Set(udpMicros, round, micros*float64(round+1))
		}
	}
	r.of(lab.AgentName).Set(mixFigure(lab.Mixes()[0]), 0, 10)
	r.LeftOut["istio"] = "does not build"
	r.note("a note")
	r.Push = &pushResults{Hosts: 100_000, Bytes: 7_500_000, Figures: report.Figures{}}
	r.Push.Figures.Set(firstPush, 0, 300)
	r.Push.Figures.Set(firstPush+sinkSuffix, 0, 50)
	r.compare()
	return r
}

func TestReport(t *testing.T) {
	r := exampleResults()
	for name, text := range map[string]string{"text": r.text(), "markdown": r.markdown()} {
		for _, want := range []string{"10,000 hosts", "2.00", "LEFT OUT: Istio's agent: does not build", "note: a note", "250"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q in\n%s", name, want, text)
			}
		}
	}
	path := filepath.Join(t.TempDir(), "out.json")
	if err := r.write(path); err != nil {
		t.Fatal(err)
	}
}

func TestChart(t *testing.T) {
	chart := exampleResults().chart()
	decoder := xml.NewDecoder(strings.NewReader(chart))
	var bars []string
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("not well-formed: %v\n%s", err, chart)
		}
		if element, ok := token.(xml.StartElement); ok && element.Name.Local == "rect" {
			bars = append(bars, element.Attr[0].Value)
		}
	}
	if strings.Join(bars, " ") != "bar own" {
		t.Errorf("bars %v, want the cheaper echo first", bars)
	}
}

func TestParseOptions(t *testing.T) {
	o, err := parseOptions([]string{"-peers", "nametap,nsd", "-rounds", "7"}, io.Discard)
	if err != nil || o.rounds != 7 || o.hosts != 10_000 || !o.wants("nsd") || !o.wants(lab.EchoName) || o.wants("istio") {
		t.Errorf("%+v, %v", o, err)
	}
	if o, err := parseOptions(nil, io.Discard); err != nil || !o.wants("istio") {
		t.Errorf("%+v, %v", o, err)
	}
	for _, argv := range [][]string{{"-peers", "bind"}, {"-rounds", "0"}, {"-hosts", "2000000"}, {"rest"}, {"-no"}} {
		if o, err := parseOptions(argv, io.Discard); err == nil {
			t.Errorf("%q: %+v, want an error", argv, o)
		}
	}
}

func TestVersions(t *testing.T) {
	for version, want := range map[string]string{
		"v0.0.0-20260827124520-eed52ebb66ad": "20260827124520", "v1.15.0": "v1.15.0", "": "",
	} {
		if got := shortVersion(version); got != want {
			t.Errorf("%q: %q, want %q", version, got, want)
		}
	}
}
