package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
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

// inJournal reports whether a file is the stream of journald that systemd gave to this process
// (JOURNAL_STREAM in systemd.exec(5)).
func inJournal(file any) bool {
	f, isFile := file.(*os.File)
	stream := os.Getenv("JOURNAL_STREAM")
	if !isFile || stream == "" {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && stream == fmt.Sprintf("%d:%d", stat.Dev, stat.Ino)
}

// Prefixes of lines that tell journald their priority (sd-daemon(3)).
const (
	journalError   = "<3>"
	journalWarning = "<4>"
	journalInfo    = "<6>"
	journalDebug   = "<7>"
)

// A journalWriter puts the prefix of its priority before each record of the log. A record is a line, in which the level
// follows the time: level=WARN, or "level":"WARN".
type journalWriter struct{ io.Writer }

// Write writes a record.
func (w journalWriter) Write(record []byte) (int, error) {
	_, level, _ := bytes.Cut(record, []byte("level"))
	prefix := journalInfo
	switch level = bytes.TrimLeft(level, `":=`); {
	case bytes.HasPrefix(level, []byte("ERROR")):
		prefix = journalError
	case bytes.HasPrefix(level, []byte("WARN")):
		prefix = journalWarning
	case bytes.HasPrefix(level, []byte("DEBUG")):
		prefix = journalDebug
	}
	_, err := w.Writer.Write(append([]byte(prefix), record...)) // in one piece
	return len(record), err
}

// prefixLines puts a prefix before each line of a text.
func prefixLines(prefix, text string) string {
	var lines strings.Builder
	for line := range strings.Lines(text) {
		lines.WriteString(prefix + line)
	}
	return lines.String()
}
