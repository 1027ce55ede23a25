package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	nan := number(math.NaN())
	for _, c := range []struct {
		figure figure
		want   float64
	}{
		{figure{3}, 3},
		{figure{3, 1, 2}, 2},
		{figure{4, 1, 2, 3}, 2.5},
		{figure{nan, 5, nan}, 5},
	} {
		if got := c.figure.median(); got != c.want {
			t.Errorf("%v: %v, want %v", c.figure, got, c.want)
		}
	}
	if got := (figure{nan}).median(); !math.IsNaN(got) {
		t.Errorf("no round counts: %v, want NaN", got)
	}
}

// Ratios are taken within a round: here each is 2, though the medians are not.
func TestOver(t *testing.T) {
	if got := (figure{2, 20, 6}).over(figure{1, 10, 3}).median(); got != 2 {
		t.Errorf("%v, want 2", got)
	}
	if got := (figure{5, 7}).minus(figure{1, 2}); got[0] != 4 || got[1] != 5 {
		t.Errorf("%v, want 4 and 5", got)
	}
}

func TestFiguresJSON(t *testing.T) {
	f := figures{}
	f.set("x", 2, 123.456)
	got, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"x":{"median":123.5,"rounds":[null,null,123.5]}}`; string(got) != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTable(t *testing.T) {
	example := table{
		title:  "Title",
		header: []string{"server", "µs"},
		rows:   [][]string{{"é|x", "1.00"}, {"long name", "–"}},
	}
	text := "Title\n\n  server       µs\n  é|x        1.00\n  long name     –\n\n"
	if got := example.text(); got != text {
		t.Errorf("%q, want %q", got, text)
	}
	markdown := "Title\n\n| server | µs |\n|---|---:|\n| é\\|x | 1.00 |\n| long name | – |\n\n"
	if got := example.markdown(); got != markdown {
		t.Errorf("%q, want %q", got, markdown)
	}
}

func TestCell(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.00", 5.678: "5.68", 56.78: "56.8", 567.8: "568", 1234567: "1,234,567", -1234: "-1,234", 1000.4: "1,000",
	} {
		if got := cell(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}

// exampleResults has an echo and an agent, and no figures of Istio.
func exampleResults() *results {
	r := newResults(options{hosts: 10_000, rounds: 2, seconds: 1})
	r.Machine.Processor = `A <"fast"> & small one`
	for name, micros := range map[string]float64{echoName: 5, agentName: 10} {
		s := &server{peer: peer{name: name, title: name + " <&>"}}
		r.add(s)
		for round := range 2 {
			r.of(name).set(udpMicros, round, micros*float64(round+1))
		}
	}
	r.of(agentName).set(mixFigure(mixes()[0]), 0, 10)
	r.LeftOut["istio"] = "does not build"
	r.note("a note")
	r.Push = &pushResults{Hosts: 100_000, Bytes: 7_500_000, Figures: figures{}}
	r.Push.Figures.set(firstPush, 0, 300)
	r.Push.Figures.set(firstPush+sinkSuffix, 0, 50)
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
	if err != nil || o.rounds != 7 || o.hosts != 10_000 || !o.wants("nsd") || !o.wants(echoName) || o.wants("istio") {
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

func TestLineWriter(t *testing.T) {
	w := newLineWriter()
	for _, part := range []string{"a", "ck\nna", "ck \"x\"\n"} {
		if n, err := w.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatal(n, err)
		}
	}
	if one, two := <-w.lines, <-w.lines; one != "ack" || two != `nack "x"` {
		t.Errorf("lines %q and %q", one, two)
	}
}
