package main

import (
	"bytes"
	"syscall"
	"testing"
)

// A fullDisk refuses every write while it is full.
type fullDisk struct {
	bytes.Buffer
	full bool
}

// Write writes to the buffer, or fails.
func (d *fullDisk) Write(p []byte) (int, error) {
	if d.full {
		return 0, syscall.ENOSPC
	}
	return d.Buffer.Write(p)
}

// The number of lines that could not be written is in the log before the next line.
func TestLogWriterFullDisk(t *testing.T) { // R8
	disk := &fullDisk{full: true}
	w := &logWriter{to: disk}
	for range 3 {
		w.writeLine([]byte("lost\n"))
	}
	disk.full = false
	w.writeLine([]byte("kept\n"))
	if want := "3 lines of the log are lost because they could not be written\nkept\n"; disk.String() != want {
		t.Errorf("%q, want %q", disk.String(), want)
	}
}
