// Package report turns measured values into figures, tables and charts.
package report

import (
	"math"
	"slices"
)

// A Figure is one quantity of one server, with a value for each round. The value
// of a round that does not count is NaN.
type Figure []float64

// Median returns the median of the rounds that count, or NaN.
func (f Figure) Median() float64 {
	var counted []float64
	for _, v := range f {
		if !math.IsNaN(v) {
			counted = append(counted, v)
		}
	}
	if len(counted) == 0 {
		return math.NaN()
	}
	slices.Sort(counted)
	middle := len(counted) / 2
	if len(counted)%2 == 1 {
		return counted[middle]
	}
	return (counted[middle-1] + counted[middle]) / 2
}

// Over divides round by round, because a disturbance of a round affects both figures.
func (f Figure) Over(base Figure) Figure {
	ratios := make(Figure, min(len(f), len(base)))
	for i := range ratios {
		ratios[i] = f[i] / base[i]
	}
	return ratios
}

// Figures holds the figures of one server by their names.
type Figures map[string]Figure

// Set stores the value of a round, counted from 0.
func (f Figures) Set(name string, round int, value float64) {
	for len(f[name]) <= round {
		f[name] = append(f[name], math.NaN())
	}
	f[name][round] = value
}

// Minus subtracts round by round.
func (f Figure) Minus(base Figure) Figure {
	differences := make(Figure, min(len(f), len(base)))
	for i := range differences {
		differences[i] = f[i] - base[i]
	}
	return differences
}
