package report

import (
	"encoding/json"
	"math"
	"testing"
)

func TestMedian(t *testing.T) {
	nan := number(math.NaN())
	for _, c := range []struct {
		figure Figure
		want   float64
	}{
		{Figure{3}, 3},
		{Figure{3, 1, 2}, 2},
		{Figure{4, 1, 2, 3}, 2.5},
		{Figure{nan, 5, nan}, 5},
	} {
		if got := c.figure.Median(); got != c.want {
			t.Errorf("%v: %v, want %v", c.figure, got, c.want)
		}
	}
	if got := (Figure{nan}).Median(); !math.IsNaN(got) {
		t.Errorf("no round counts: %v, want NaN", got)
	}
}

// Ratios are taken within a round: here each is 2, though the medians are not.
func TestOver(t *testing.T) {
	if got := (Figure{2, 20, 6}).Over(Figure{1, 10, 3}).Median(); got != 2 {
		t.Errorf("%v, want 2", got)
	}
	if got := (Figure{5, 7}).Minus(Figure{1, 2}); got[0] != 4 || got[1] != 5 {
		t.Errorf("%v, want 4 and 5", got)
	}
}

func TestFiguresJSON(t *testing.T) {
	f := Figures{}
	f.Set("x", 2, 123.456)
	got, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"x":{"median":123.5,"rounds":[null,null,123.5]}}`; string(got) != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTable(t *testing.T) {
	example := Table{
		Title:  "Title",
		Header: []string{"server", "µs"},
		Rows:   [][]string{{"é|x", "1.00"}, {"long name", "–"}},
	}
	text := "Title\n\n  server       µs\n  é|x        1.00\n  long name     –\n\n"
	if got := example.Text(); got != text {
		t.Errorf("%q, want %q", got, text)
	}
	markdown := "Title\n\n| server | µs |\n|---|---:|\n| é\\|x | 1.00 |\n| long name | – |\n\n"
	if got := example.Markdown(); got != markdown {
		t.Errorf("%q, want %q", got, markdown)
	}
}

func TestCell(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.00", 5.678: "5.68", 56.78: "56.8", 567.8: "568", 1234567: "1,234,567", -1234: "-1,234", 1000.4: "1,000",
	} {
		if got := Cell(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}
