// Package supervise keeps a command running that answers DNS on sockets which this
// process holds. While the command restarts, queries wait in the sockets.
//
//  1. The command is started again at once when it ends unasked, and with a pause of up
//     to maxPause when it goes on doing so.
//  2. It is killed, and started again, when no socket has answered a probe for about
//     hungProbes times probeInterval. A probe that cannot be sent does not count.
//  3. Signals are passed on. After one that asks for the end, and after an end with code
//     0, the command is not started again, and its exit code is returned.
//  4. As process 1 of a container, this process collects the children of all others.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A command that ends within steadyAfter is started again after a pause, which
	// doubles from minPause up to maxPause; the first time there is none.
	steadyAfter = 10 * time.Second
	minPause    = 20 * time.Millisecond
	maxPause    = time.Second
	// abandonAfter is from which end in a row on Abandoned is called: after some 300 ms.
	abandonAfter = 5
	// dumpTime is how long a command that hangs has to print its stacks.
	dumpTime = 2 * time.Second
)

// The environment variables by which the command knows its sockets, which begin with
// descriptor 3, and how often it was started before.
const (
	SocketsEnv  = "_NAMETAP_SOCKETS"
	RestartsEnv = "_NAMETAP_RESTARTS"
)

// firstSocket is the descriptor of the first socket that is handed over.
const firstSocket = 3

// A Config says what is run.
type Config struct {
	// Path is the program, Args its arguments with its name, Env its environment.
	Path      string
	Args, Env []string
	// Sockets are handed over, UDP and TCP. The UDP sockets are probed.
	Sockets []*os.File
	// EndSignals ask the command to end. SIGHUP is passed on in either case, unless it is
	// ignored.
	EndSignals []os.Signal
	// Abandoned is called at each further end when the command goes on ending, and when
	// it has ended for good otherwise than by code 0. nil does nothing.
	Abandoned func()
	// Log takes what an operator should know.
	Log *slog.Logger
}

// A supervisor is one call of Run. Its fields belong to the goroutine of Run.
type supervisor struct {
	Config
	pid      int // of the command, 0 if it does not run
	started  time.Time
	restarts int
	quick    int // ends in a row, each soon after the start
	misses   int // probes in a row that no socket has answered
	ending   bool
}

// Run runs the command until it ends for good, and returns its exit code: 128 and the
// signal if a signal has ended it. An error is that it cannot be started at all.
func Run(cfg Config) (code int, err error) {
	// The kernel tells the command of our death when the thread ends that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &supervisor{Config: cfg}
	signals := make(chan os.Signal, 16)
	passed := append(slices.Clone(cfg.EndSignals), syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	if !signal.Ignored(syscall.SIGHUP) {
		passed = append(passed, syscall.SIGHUP)
	}
	signal.Notify(signals, passed...)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	probes, err := newProber(cfg.Sockets)
	if err != nil {
		return 0, err
	}
	answered := make(chan error)
	go probes.run(ctx, answered)
	if err := s.start(); err != nil {
		return 0, err
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	return s.loop(signals, ended, answered), nil
}

// loop reacts to what happens until the command has ended for good.
func (s *supervisor) loop(signals, ended <-chan os.Signal, answered <-chan error) (code int) {
	var restart, kill <-chan time.Time
	for {
		if status, over := s.collect(); over {
			code = exitCode(status)
			if s.ending || code == 0 {
				s.leave(code)
				return code
			}
			kill, restart = nil, time.After(s.pause(status))
		}
		select {
		case <-ended:
		case sig := <-signals:
			s.ending = s.ending || slices.Contains(s.EndSignals, sig)
			if s.pid == 0 && s.ending {
				s.leave(code)
				return code
			}
			s.signal(sig.(syscall.Signal))
		case <-restart:
			restart = nil
			if err := s.start(); err != nil {
				s.Log.Error("the agent cannot be started and is tried again", "error", err)
				restart = time.After(maxPause)
			}
		case err := <-answered:
			if s.hangs(err) {
				s.Log.Error("no DNS listener answers: the agent is killed", "error", err)
				s.signal(syscall.SIGQUIT) // prints where its goroutines are
				kill = time.After(dumpTime)
			}
		case <-kill:
			s.signal(syscall.SIGKILL)
		}
	}
}

// start starts the command. It gets a process group of its own, so that a terminal's
// signals come to it once, from us.
func (s *supervisor) start() error {
	files := []uintptr{0, 1, 2}
	for _, socket := range s.Sockets {
		files = append(files, socket.Fd())
	}
	env := append(slices.Clone(s.Env), fmt.Sprintf("%s=%d", SocketsEnv, len(s.Sockets)), fmt.Sprintf("%s=%d", RestartsEnv, s.restarts))
	pid, err := syscall.ForkExec(s.Path, s.Args, &syscall.ProcAttr{
		Env: env, Files: files,
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		return fmt.Errorf("starting %s: %w", s.Path, err)
	}
	s.pid, s.started, s.misses = pid, time.Now(), 0
	return nil
}

// collect collects all children that have ended, those of others too. over is that the
// command is one of them.
func (s *supervisor) collect() (status syscall.WaitStatus, over bool) {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil || pid == 0:
			return status, over
		case pid == s.pid:
			status, over, s.pid = ws, true, 0
		}
	}
}

// pause returns how long to wait before the command is started again, and says why it is.
func (s *supervisor) pause(status syscall.WaitStatus) time.Duration {
	lived := time.Since(s.started)
	if lived >= steadyAfter {
		s.quick = 0
	}
	var pause time.Duration
	if s.quick > 0 {
		pause = min(minPause<<min(s.quick-1, 10), maxPause)
	}
	s.quick++
	s.restarts++
	s.Log.Error("the agent has ended and is started again", "how", describe(status),
		"after", lived.Round(time.Millisecond), "in", pause, "restarts", s.restarts)
	if s.quick >= abandonAfter { // each time: the command may have begun something anew
		s.abandon()
	}
	return pause
}

// abandon says that nothing answers on the sockets.
func (s *supervisor) abandon() {
	if s.Abandoned != nil {
		s.Abandoned()
	}
}

// leave is called when the command has ended for good.
func (s *supervisor) leave(code int) {
	if code != 0 {
		s.abandon()
	}
}

// hangs notes the result of a probe. It reports true once too many in a row have failed.
// So it is after the end was asked for, too: a command that ends as it should closes its
// sockets last.
func (s *supervisor) hangs(err error) bool {
	if errors.Is(err, errUnasked) {
		return false
	}
	s.misses++
	if err == nil || s.pid == 0 {
		s.misses = 0
	}
	return s.misses == hungProbes
}

// signal passes a signal on. The command is ours to collect, so its number is no other
// process's.
func (s *supervisor) signal(sig syscall.Signal) {
	if s.pid != 0 {
		_ = unix.Kill(s.pid, sig) // it may have ended
	}
}

// exitCode returns the code of a command as a shell does.
func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// describe says how a command has ended.
func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "signal: " + status.Signal().String()
	}
	return fmt.Sprintf("exit code %d", status.ExitStatus())
}

// Sockets returns the sockets that were handed over to this process, if it was started
// by Run, and how often that had started it before. It returns none otherwise.
func Sockets() (sockets []*os.File, restarts int, supervised bool) {
	var count int
	if _, err := fmt.Sscan(os.Getenv(SocketsEnv), &count); err != nil {
		return nil, 0, false
	}
	_, _ = fmt.Sscan(os.Getenv(RestartsEnv), &restarts) // 0 if it is not there
	for fd := firstSocket; fd < firstSocket+count; fd++ {
		syscall.CloseOnExec(fd)
		sockets = append(sockets, os.NewFile(uintptr(fd), fmt.Sprintf("supervised socket %d", fd)))
	}
	return sockets, restarts, true
}
