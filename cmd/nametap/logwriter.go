package main

import (
	"fmt"
	"io"
	"sync/atomic"
	"time"
)

const (
	// logLines is how many lines wait for a log that is not read; further ones are lost.
	logLines = 1024
	// logCloseTimeout is how long the last lines, or the last error, may take.
	logCloseTimeout = time.Second
)

// A logWriter passes lines on without ever waiting for the reader of the log: a pager
// that is stopped, or a pipe that is full, must not stop DNS.
type logWriter struct {
	to      io.Writer
	lines   chan []byte
	lost    atomic.Int64
	closing chan struct{}
	closed  chan struct{}
}

// newLogWriter returns a writer to be closed.
func newLogWriter(to io.Writer) *logWriter {
	w := &logWriter{to: to, lines: make(chan []byte, logLines), closing: make(chan struct{}), closed: make(chan struct{})}
	go w.run()
	return w
}

// Write takes a line, or loses it. It never fails.
func (w *logWriter) Write(line []byte) (int, error) {
	select {
	case w.lines <- append([]byte(nil), line...):
	default:
		w.lost.Add(1)
	}
	return len(line), nil
}

// run passes lines on until the writer is closed and none is left.
func (w *logWriter) run() {
	defer close(w.closed)
	for {
		select {
		case line := <-w.lines:
			w.pass(line)
			continue
		default:
		}
		select {
		case line := <-w.lines:
			w.pass(line)
		case <-w.closing:
			return
		}
	}
}

// pass writes a line, after how many before it were lost. There is nothing to be done
// about a log that cannot be written, such as on a disk that is full, but to count.
func (w *logWriter) pass(line []byte) {
	if lost := w.lost.Swap(0); lost > 0 {
		if _, err := fmt.Fprintf(w.to, "%d lines of the log are lost: they could not be written\n", lost); err != nil {
			w.lost.Add(lost)
		}
	}
	if _, err := w.to.Write(line); err != nil {
		w.lost.Add(1)
	}
}

// close returns when all lines are written, or after a while.
func (w *logWriter) close() {
	close(w.closing)
	select {
	case <-w.closed:
	case <-time.After(logCloseTimeout):
	}
}

// printError prints a message, unless the output is not read for a while.
func printError(to io.Writer, message string) {
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		_, _ = io.WriteString(to, message) // there is nowhere else to say it
	}()
	select {
	case <-printed:
	case <-time.After(logCloseTimeout):
	}
}
