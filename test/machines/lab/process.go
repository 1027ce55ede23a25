package lab

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A Process is a program that runs as long as its test, and the file with what it logs.
type Process struct {
	Cmd   *exec.Cmd
	Log   string
	Ended chan struct{} // closed when it has ended

	tb    testing.TB
	begun int64 // length of the log at the start, if an earlier process has the same name
	inner bool  // the program is the child of a process that has entered other namespaces
}

// Spawn starts a command. It is killed after the test, and if the test is killed. Its output goes to NAME.log.
func (p *Place) Spawn(name string, cmd *exec.Cmd) *Process {
	p.TB.Helper()
	d := &Process{Cmd: cmd, Log: p.Path(name + ".log"), Ended: make(chan struct{}), tb: p.TB, inner: p.enter != nil}
	log, err := os.OpenFile(d.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.TB.Fatal(err)
	}
	defer log.Close()
	if d.begun, err = log.Seek(0, io.SeekEnd); err != nil {
		p.TB.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if cmd.Dir == "" {
		cmd.Dir = p.Dir
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := p.Start(cmd); err != nil {
		p.TB.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in the log
		close(d.Ended)
	}()
	p.TB.Cleanup(func() { d.End(syscall.SIGKILL) })
	return d
}

// Signal sends a signal.
func (d *Process) Signal(signal os.Signal) {
	if children := process.Children(d.Cmd.Process.Pid); d.inner && len(children) > 0 {
		for _, pid := range children {
			_ = syscall.Kill(pid, signal.(syscall.Signal))
		}
		return
	}
	_ = d.Cmd.Process.Signal(signal) // the process may have ended
}

// End sends a signal and returns when the process has ended.
func (d *Process) End(signal os.Signal) {
	d.tb.Helper()
	d.Signal(signal)
	wait.For(d.tb, d.Cmd.Path+" ends", d.Ended)
}

// Await waits for a condition that the process makes true, and fails if the process ends.
func (d *Process) Await(what string, condition func() bool) {
	d.tb.Helper()
	Until(d.tb, what+", see "+d.Log, func() bool {
		select {
		case <-d.Ended:
			lines := strings.SplitAfter(d.Text(), "\n")
			d.tb.Fatalf("%s ended before %s, see %s:\n%s", d.Cmd, what, d.Log, strings.Join(lines[max(0, len(lines)-20):], ""))
		default:
		}
		return condition()
	})
}

// Text returns what the process has logged.
func (d *Process) Text() string {
	d.tb.Helper()
	text, err := os.ReadFile(d.Log)
	if err != nil {
		d.tb.Fatal(err)
	}
	return string(text[d.begun:])
}

// Logged returns the number of lines of the log that contain all parts.
func (d *Process) Logged(parts ...string) int {
	d.tb.Helper()
	n := 0
lines:
	for line := range strings.Lines(d.Text()) {
		for _, part := range parts {
			if !strings.Contains(line, part) {
				continue lines
			}
		}
		n++
	}
	return n
}

// field returns a field of /proc/PID/status, in KiB; -1 if the process has ended.
func (d *Process) field(name string) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Cmd.Process.Pid))
	_, rest, found := strings.Cut(string(text), "\n"+name+":")
	if err != nil || !found {
		return -1
	}
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		return -1
	}
	return kib
}

// Anonymous returns the anonymous memory of the process in KiB; Resident and Peak what it has and had in memory.
func (d *Process) Anonymous() int { return d.field("RssAnon") }

// Resident returns how many KiB the process has in memory.
func (d *Process) Resident() int { return d.field("VmRSS") }

// Peak returns how many KiB the process had in memory at most.
func (d *Process) Peak() int { return d.field("VmHWM") }

// Processor returns the processor time that the process has used.
func (d *Process) Processor() time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.Cmd.Process.Pid))
	if err != nil {
		return 0 // it has ended
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name of the program, from field 3 on
	fields := strings.Fields(rest)
	user, _ := strconv.Atoi(fields[14-3])
	system, _ := strconv.Atoi(fields[15-3])
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every architecture of Linux that Go supports
	return time.Duration(user+system) * tick
}
