// Package testlog keeps what is logged, for tests to look at.
package testlog

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
)

// A Buffer is a log that can be read while it is written, by any goroutines. The zero
// value is empty.
type Buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write adds to the log.
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

// Count returns how many lines have a text in them.
func (b *Buffer) Count(text string) int {
	n := 0
	for line := range strings.Lines(b.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// Logger returns a logger that writes to the buffer.
func (b *Buffer) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }
