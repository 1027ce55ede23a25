package main

import (
	"testing"
	"time"

	"github.com/nametap/nametap/bench/report"
)

func TestAskedFigures(t *testing.T) {
	a := asked{agent: 40 * time.Microsecond, client: 20 * time.Microsecond}
	for _, micros := range []int{9, 1, 2, 5} {
		a.took = append(a.took, time.Duration(micros)*time.Microsecond)
	}
	f := report.Figures{}
	a.enter(f, 0)
	for name, want := range map[string]float64{captureAgent: 10, captureBoth: 15, latencyP50: 5, latencyP99: 9} {
		if got := f[name].Median(); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
