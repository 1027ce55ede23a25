// Package supervise runs a command that answers DNS, restarts it, and holds its sockets, in which queries wait meanwhile.
//
//  1. If the command ends without a signal to end, it is restarted: at once the first time, then after pauses of up to
//     maxPause.
//  2. Signals are passed to the command. After a signal to end, and after exit code 0, the command is not restarted, and
//     its exit code is returned.
//  3. As process 1 of a container, this process reaps orphaned processes.
//
// A command that hangs is not noticed here: the agent ends itself when its listeners do not answer, and kubelet's
// liveness probe sees a process that stands still.
package supervise

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// If the command ends within steadyAfter of its start, it is restarted after a pause, which doubles from minPause up to
// maxPause. The first restart has no pause.
const (
	steadyAfter = 10 * time.Second
	minPause    = 20 * time.Millisecond
	maxPause    = time.Second
)

// socketsEnv is the environment variable with the number of sockets of the command; their descriptors begin at
// firstSocket. restartsEnv is the one with the number of restarts of the command.
const (
	socketsEnv  = "_NAMETAP_SOCKETS"
	restartsEnv = "_NAMETAP_RESTARTS"
	firstSocket = 3
)

// A Config describes the command.
type Config struct {
	// Path is the path of the program, Args its arguments including its name, Env its environment.
	Path      string
	Args, Env []string
	// Sockets are the UDP and TCP sockets that are passed to the command.
	Sockets []*os.File
	// EndSignals are the signals that ask the command to end. SIGHUP is passed to the command even if EndSignals
	// does not have it, unless this process ignores SIGHUP.
	EndSignals []os.Signal
	// Log gets restarts and errors.
	Log *slog.Logger
}

// A supervisor is one call of Run. Its fields belong to the goroutine of Run.
type supervisor struct {
	Config
	pid       int       // process number of the command; 0 while it does not run
	started   time.Time // when the command was last started
	restarts  int       // number of ends after which it was started again
	quickEnds int       // number of ends in succession, each within steadyAfter of the start
	ending    bool      // a signal to end has arrived
}

// Run runs the command until its last end, and returns its exit code, or 128 plus the
// number of the signal that ended it. It returns an error if the command cannot be started.
func Run(cfg Config) (code int, err error) {
	// The kernel sends the command a signal (Pdeathsig) when the thread that started it ends. So this goroutine keeps
	// its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := &supervisor{Config: cfg}
	signals, ended := make(chan os.Signal, 16), make(chan os.Signal, 1)
	passed := append(slices.Clone(cfg.EndSignals), syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	if !signal.Ignored(syscall.SIGHUP) {
		passed = append(passed, syscall.SIGHUP)
	}
	signal.Notify(signals, passed...)
	defer signal.Stop(signals)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	if err := s.start(); err != nil {
		return 0, err
	}
	for restart := (<-chan time.Time)(nil); ; {
		if status, commandEnded := s.collect(); commandEnded {
			code = exitCode(status)
			if s.ending || code == 0 {
				return code, nil
			}
			restart = time.After(s.pause(status))
		}
		select {
		case <-ended:
		case sig := <-signals:
			if s.pass(sig); s.ending && s.pid == 0 {
				return code, nil
			}
		case <-restart:
			restart = nil
			if err := s.start(); err != nil {
				s.Log.Error("starting the agent failed; retrying", "error", err)
				restart = time.After(maxPause)
			}
		}
	}
}

// start starts the command, in a process group of its own, so that the command gets a signal of the terminal only
// from this process, and not twice.
func (s *supervisor) start() error {
	files := []uintptr{0, 1, 2}
	for _, socket := range s.Sockets {
		files = append(files, socket.Fd())
	}
	env := append(slices.Clone(s.Env), fmt.Sprintf("%s=%d", socketsEnv, len(s.Sockets)), fmt.Sprintf("%s=%d", restartsEnv, s.restarts))
	pid, err := syscall.ForkExec(s.Path, s.Args, &syscall.ProcAttr{
		Env: env, Files: files,
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		return fmt.Errorf("starting %s: %w", s.Path, err)
	}
	s.pid, s.started = pid, time.Now()
	return nil
}

// pass passes a signal to the command. No other process can have its number, because it has not been reaped yet.
func (s *supervisor) pass(sig os.Signal) {
	s.ending = s.ending || slices.Contains(s.EndSignals, sig)
	if s.pid != 0 {
		_ = syscall.Kill(s.pid, sig.(syscall.Signal)) // fails if the command has ended
	}
}

// collect reaps all children that have ended: process 1 also has orphans of other processes as its children.
// commandEnded is true if the command is one of the children that have ended; status is its status.
func (s *supervisor) collect() (status syscall.WaitStatus, commandEnded bool) {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil || pid == 0:
			return status, commandEnded
		case pid == s.pid:
			status, commandEnded, s.pid = ws, true, 0
		}
	}
}

// pause returns the pause before the next start of the command, and logs the reason of the restart.
func (s *supervisor) pause(status syscall.WaitStatus) (pause time.Duration) {
	lived, how := time.Since(s.started), fmt.Sprintf("exit code %d", status.ExitStatus())
	if status.Signaled() {
		how = "signal: " + status.Signal().String()
	}
	if lived >= steadyAfter {
		s.quickEnds = 0
	}
	if s.quickEnds > 0 {
		pause = clock.BackOff(s.quickEnds-1, minPause, maxPause)
	}
	s.quickEnds++
	s.restarts++
	s.Log.Error("the agent has ended: restarting it", "how", how,
		"after", lived.Round(time.Millisecond), "in", pause, "restarts", s.restarts)
	return pause
}

// exitCode returns the exit code of a command, or 128 plus the number of the signal that has ended it, as in a shell.
func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// Inherited returns the sockets that Run has passed to this process, how often Run has restarted it, and whether Run has.
func Inherited() (sockets []*os.File, restarts int, supervised bool) {
	var count int
	if _, err := fmt.Sscan(os.Getenv(socketsEnv), &count); err != nil {
		return nil, 0, false
	}
	_, _ = fmt.Sscan(os.Getenv(restartsEnv), &restarts) // 0 if it is not set
	for fd := firstSocket; fd < firstSocket+count; fd++ {
		syscall.CloseOnExec(fd)
		sockets = append(sockets, os.NewFile(uintptr(fd), "the supervisor"))
	}
	return sockets, restarts, true
}
