package lab

import (
	"context"
	"time"
)

// A Run is the result of a load.
type Run struct {
	Tally

	// processor is the processor time of the server.
	processor time.Duration
}

// Micros returns the processor time of a query, in µs.
func (r Run) Micros() float64 { return Microseconds(r.processor) / float64(r.Completed) }

// Microseconds returns d as a number of µs.
func Microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// Under runs l and measures the server's processor time.
func (i Instance) Under(ctx context.Context, l Load) (Run, error) {
	before, err := ProcessorTime(i.Pid)
	if err != nil {
		return Run{}, err
	}
	t, err := l.Run(ctx)
	if err != nil {
		return Run{}, err
	}
	after, err := ProcessorTime(i.Pid)
	return Run{Tally: t, processor: after - before}, err
}
