package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
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
