// Package testlog keeps the log of the code under test in memory, where the test can read it.
package testlog

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
)

// A Buffer is a log that can be read while it is written. The zero value is empty and
// ready to use. All methods may be called from several goroutines at once.
type Buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// New returns an empty buffer that is printed if the test fails.
func New(tb testing.TB) *Buffer {
	tb.Helper()
	b := new(Buffer)
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("the log:\n%s", b)
		}
	})
	return b
}

// Write appends to the log.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// String returns what was logged so far.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// Count returns the number of lines that contain all parts.
func (b *Buffer) Count(parts ...string) int {
	n := 0
	for line := range strings.Lines(b.String()) {
		missing := func(part string) bool { return !strings.Contains(line, part) }
		if !slices.ContainsFunc(parts, missing) {
			n++
		}
	}
	return n
}

// Logger returns a logger that writes text to the buffer, from level Info.
func (b *Buffer) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }
