package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
)

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

// journalPrefix returns the prefix for a level.
func journalPrefix(level slog.Level) string {
	switch {
	case level >= slog.LevelError:
		return journalError
	case level >= slog.LevelWarn:
		return journalWarning
	case level >= slog.LevelInfo:
		return journalInfo
	}
	return journalDebug
}

// prefixLines puts a prefix before each line of a text.
func prefixLines(prefix, text string) string {
	var lines strings.Builder
	for line := range strings.Lines(text) {
		lines.WriteString(prefix + line)
	}
	return lines.String()
}

// A prefixWriter puts a prefix before the lines of each text.
type prefixWriter struct {
	to     io.Writer
	mu     sync.Mutex // held while a record is written
	prefix string
}

// Write writes the lines in one piece.
func (w *prefixWriter) Write(text []byte) (int, error) {
	if _, err := io.WriteString(w.to, prefixLines(w.prefix, string(text))); err != nil {
		return 0, err
	}
	return len(text), nil
}

// A journalHandler formats records by another handler, whose output is a prefixWriter. Each line has the prefix of its
// priority.
type journalHandler struct {
	slog.Handler
	to *prefixWriter
}

// Handle implements [slog.Handler].
func (h journalHandler) Handle(ctx context.Context, record slog.Record) error {
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.prefix = journalPrefix(record.Level)
	return h.Handler.Handle(ctx, record)
}

// WithAttrs implements [slog.Handler].
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return journalHandler{h.Handler.WithAttrs(attrs), h.to}
}

// WithGroup implements [slog.Handler].
func (h journalHandler) WithGroup(name string) slog.Handler {
	return journalHandler{h.Handler.WithGroup(name), h.to}
}
