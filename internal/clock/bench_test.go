package clock_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
)

// BenchmarkNow compares a reading of the clock with its alternatives.
func BenchmarkNow(b *testing.B) {
	b.Run("time.Now", func(b *testing.B) {
		for b.Loop() {
			_ = time.Now()
		}
	})
	b.Run("Clock.Now", func(b *testing.B) {
		c := clock.New()
		b.ReportAllocs()
		for b.Loop() {
			_ = c.Now()
		}
	})
	b.Run("CLOCK_BOOTTIME", func(b *testing.B) {
		var ts unix.Timespec
		for b.Loop() {
			_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
		}
	})
}
