package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// A Command describes how to start a process.
type Command struct {
	// Name is used in messages and for the file with its output.
	Name string
	Argv []string
	// Core is the processor that the process is bound to; empty means all.
	Core string
	// User is the uid and the gid of the process; 0 means that it has the user of bench.
	User uint32
	// stdin and stdout may be nil: input is then empty, and output goes to the log.
	stdin  io.Reader
	stdout io.Writer
}

// A Process is a running server of the benchmark.
type Process struct {
	Name string
	Pid  int
	log  string
	// done is closed when the process has ended.
	done   chan struct{}
	cancel context.CancelFunc
}

// startProcess starts c in dir, which also has its log. The process has its own process
// group: only bench gets the signal of ^C. The kernel kills the process when bench dies.
// The caller must stop it.
func startProcess(ctx context.Context, dir string, c Command) (*Process, error) {
	argv := c.Argv
	if c.Core != "" {
		argv = append([]string{"taskset", "-c", c.Core}, argv...)
	}
	log, err := os.CreateTemp(dir, c.Name+"-*.log")
	if err != nil {
		return nil, fmt.Errorf("making a log: %w", err)
	}
	defer log.Close() // the child holds its own descriptor
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	// No environment variables: GODEBUG, GOGC or settings of the agent would change the
	// figures.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.stdin, c.stdout, log
	if c.stdout == nil {
		cmd.Stdout = log
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if c.User != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: c.User, Gid: c.User}
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 3 * time.Second
	if err := cmd.Start(); err != nil {
		cancel()
		return nil, fmt.Errorf("starting %s: %w", c.Name, err)
	}
	p := &Process{Name: c.Name, Pid: cmd.Process.Pid, log: log.Name(), done: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // its log shows how it ended
	}()
	return p, nil
}

// stop ends the process and its children, and returns when it has ended.
func (p *Process) stop() {
	p.cancel()
	<-p.done
	// Remaining children are in its process group.
	_ = syscall.Kill(-p.Pid, syscall.SIGKILL)
}

// Alive returns an error with the end of the log if the process has ended.
func (p *Process) Alive() error {
	select {
	case <-p.done:
		return fmt.Errorf("%s has ended; its output: %s", p.Name, p.tail())
	default:
		return nil
	}
}

// tail returns the end of the log.
func (p *Process) tail() string {
	const longest = 600
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	if len(text) > longest {
		text = text[len(text)-longest:]
	}
	return string(text)
}

// Await calls ready until it succeeds, the time is up or p has ended.
func (p *Process) Await(ctx context.Context, limit time.Duration, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		if gone := p.Alive(); gone != nil {
			return gone
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %v: %w", p.Name, limit, errors.Join(err, errors.New(p.tail())))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Output runs a command to its end and returns what it printed on both streams.
func Output(ctx context.Context, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("running %s: %w: %s", filepath.Base(argv[0]), err, out)
	}
	return string(out), nil
}
