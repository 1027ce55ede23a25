package main

import (
	"bytes"
	"syscall"
	"testing"
)

// A fullDisk takes nothing as long as it is full.
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

// Lines that cannot be written are counted in the next one that can.
func TestLogWriterFullDisk(t *testing.T) { // R8
	disk := &fullDisk{full: true}
	w := &logWriter{to: disk}
	for range 3 {
		w.pass([]byte("lost\n"))
	}
	disk.full = false
	w.pass([]byte("kept\n"))
	if want := "3 lines of the log are lost: they could not be written\nkept\n"; disk.String() != want {
		t.Errorf("%q, want %q", disk.String(), want)
	}
}
