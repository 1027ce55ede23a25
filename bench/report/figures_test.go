package report

import (
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
