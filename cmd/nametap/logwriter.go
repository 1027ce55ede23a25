package main

import (
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/clip"
)

const (
	// logLines is how many lines wait while the log is not read. Further lines are dropped.
	logLines = 1024
	// logCloseTimeout is how long writing the last lines, or the last error, may take.
	logCloseTimeout = time.Second
)

// A logWriter writes lines in a goroutine of its own, so that no caller waits for the reader
// of the log: a stopped pager or a full pipe must not stop DNS.
type logWriter struct {
	to      io.Writer
	lines   chan []byte
	lost    atomic.Int64
	closing chan struct{}
	closed  chan struct{}
}

// newLogWriter returns a writer. The caller closes it.
func newLogWriter(to io.Writer) *logWriter {
	w := &logWriter{to: to, lines: make(chan []byte, logLines), closing: make(chan struct{}), closed: make(chan struct{})}
	go w.run()
	return w
}

// Write queues a line, or drops it if too many wait. It does not fail.
func (w *logWriter) Write(line []byte) (int, error) {
	select {
	case w.lines <- append([]byte(nil), line...):
	default:
		w.lost.Add(1)
	}
	return len(line), nil
}

// run writes lines until the writer is closed and no line is left.
func (w *logWriter) run() {
	defer close(w.closed)
	for {
		select {
		case line := <-w.lines:
			w.writeLine(line)
			continue
		default:
		}
		select {
		case line := <-w.lines:
			w.writeLine(line)
		case <-w.closing:
			return
		}
	}
}

// writeLine writes a line, and before it the number of lines that were lost. A line that cannot
// be written, for example on a full disk, is counted as lost.
func (w *logWriter) writeLine(line []byte) {
	if lost := w.lost.Swap(0); lost > 0 {
		prefix := ""
		if inJournal(w.to) {
			prefix = journalWarning
		}
		_, err := fmt.Fprintf(w.to, prefix+"%d lines of the log are lost because they could not be written\n", lost)
		if err != nil {
			w.lost.Add(lost)
		}
	}
	if _, err := w.to.Write(line); err != nil {
		w.lost.Add(1)
	}
}

// close returns when all lines are written, or after logCloseTimeout.
func (w *logWriter) close() {
	close(w.closing)
	select {
	case <-w.closed:
	case <-time.After(logCloseTimeout):
	}
}

// printError prints a message, but does not wait longer than logCloseTimeout for the reader.
func printError(to io.Writer, message string) {
	message = clip.Lines(message)
	if inJournal(to) {
		message = prefixLines(journalError, message)
	}
	w := newLogWriter(to)
	_, _ = w.Write([]byte(message)) // it does not fail
	w.close()
}
