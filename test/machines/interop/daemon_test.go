package interop

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A daemon is a running program, and the file with what it logs.
type daemon struct {
	tb    testing.TB
	cmd   *exec.Cmd
	log   string
	begun int64 // length of the file at the start, if an earlier program has the same name
	ended chan struct{}
}

// A place is where programs run.
type place struct {
	*netns.NS
	tb  testing.TB
	dir string // with files and logs
}

// run starts a program and kills it after the test. It also ends if the test is killed. Its
// output goes to NAME.log.
func (p place) run(name string, cmd *exec.Cmd) *daemon {
	p.tb.Helper()
	d := &daemon{tb: p.tb, cmd: cmd, log: p.path(name + ".log"), ended: make(chan struct{})}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.tb.Fatal(err)
	}
	defer log.Close()
	if d.begun, err = log.Seek(0, io.SeekEnd); err != nil {
		p.tb.Fatal(err)
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := p.Start(cmd); err != nil {
		p.tb.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in the log
		close(d.ended)
	}()
	p.tb.Cleanup(func() { d.end(syscall.SIGKILL) })
	return d
}

// path returns the path of a file of the place.
func (p place) path(name string) string { return filepath.Join(p.dir, name) }

// write replaces a file of the place as kubelet does, by a rename, and returns its path.
func (p place) write(name, text string) string {
	p.tb.Helper()
	path := p.path(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		p.tb.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		p.tb.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		p.tb.Fatal(err)
	}
	return path
}

// end sends a signal and returns when the process has ended.
func (d *daemon) end(signal os.Signal) {
	d.tb.Helper()
	d.signal(signal)
	select {
	case <-d.ended:
	default:
		wait.For(d.tb, d.cmd.Path+" ends", d.ended)
	}
}

// signal sends a signal.
func (d *daemon) signal(signal os.Signal) {
	_ = d.cmd.Process.Signal(signal) // the process may have ended
}

// startLimit is how long to wait for a program: the API server needs a minute on a busy machine.
const startLimit = 5 * time.Minute

// await waits for a condition that the process makes true, and fails if the process ends.
func (d *daemon) await(what string, condition func() bool) {
	d.tb.Helper()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	limit := time.After(startLimit)
	for !condition() {
		select {
		case <-d.ended:
			d.tb.Fatalf("%s ended before %s, see %s:\n%s", filepath.Base(d.cmd.Path), what, d.log, tail(d.text()))
		case <-limit:
			d.tb.Fatalf("timed out waiting: %s, see %s", what, d.log)
		case <-ticker.C:
		}
	}
}

// text returns what the process has logged.
func (d *daemon) text() string {
	d.tb.Helper()
	text, err := os.ReadFile(d.log)
	if err != nil {
		d.tb.Fatal(err)
	}
	return string(text[d.begun:])
}

// logged returns the number of lines of the log that contain all parts.
func (d *daemon) logged(parts ...string) int {
	d.tb.Helper()
	n := 0
lines:
	for line := range strings.Lines(d.text()) {
		for _, part := range parts {
			if !strings.Contains(line, part) {
				continue lines
			}
		}
		n++
	}
	return n
}

// tail returns the last lines of a text.
func tail(text string) string {
	lines := strings.SplitAfter(text, "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "")
}
