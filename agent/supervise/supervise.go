// Package supervise runs a command that answers DNS, restarts it, and holds its sockets.
// While the command restarts, queries wait in the sockets.
//
//  1. If the command ends without a signal to end, it is restarted: at once the first time,
//     then after pauses of up to maxPause.
//  2. The command writes to a pipe while it answers. If it writes nothing for hungBeats times beatInterval, it is killed
//     and restarted.
//  3. Signals are passed to the command. After a signal to end, and after exit code 0, the
//     command is not restarted, and its exit code is returned.
//  4. As process 1 of a container, this process reaps orphaned processes. If SIGSTOP stops this process, the command
//     continues it: see [WatchParent].
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

	"golang.org/x/sys/unix"
)

const (
	// If the command ends within steadyAfter of its start, it is restarted after a pause, which doubles from
	// minPause up to maxPause. The first restart has no pause.
	steadyAfter = 10 * time.Second
	minPause    = 20 * time.Millisecond
	maxPause    = time.Second
	// Abandoned is called when the command has ended abandonAfter times in succession: see [Config].
	abandonAfter = 5
	// A command without a heartbeat in hungBeats intervals in succession hangs. While this process is stopped, only one ends.
	beatInterval = 5 * time.Second
	hungBeats    = 2
	// dumpTime is the time for a hung command to print its stacks.
	dumpTime = 2 * time.Second
)

// SocketsEnv is the environment variable with the number of sockets of the command; their descriptors begin at 3. The
// next descriptor is the pipe for heartbeats.
// RestartsEnv is the environment variable with the number of restarts of the command.
const (
	SocketsEnv  = "_NAMETAP_SOCKETS"
	RestartsEnv = "_NAMETAP_RESTARTS"
)

// firstSocket is the descriptor of the first socket that is passed to the command.
const firstSocket = 3

// A Config describes the command.
type Config struct {
	// Path is the path of the program, Args its arguments including its name, Env its
	// environment.
	Path      string
	Args, Env []string
	// Sockets are the UDP and TCP sockets that are passed to the command.
	Sockets []*os.File
	// EndSignals are the signals that ask the command to end. SIGHUP is passed to the command even if EndSignals
	// does not have it, unless this process ignores SIGHUP.
	EndSignals []os.Signal
	// Abandoned is called when the command ends for the abandonAfter-th time in succession, and at each further end in
	// this succession. A command that has run for steadyAfter begins a new succession with its end. Abandoned is also
	// called after the last end, unless the exit code is 0. It may be nil.
	Abandoned func()
	// Log gets restarts and errors.
	Log *slog.Logger
}

// A supervisor is one call of Run. Its fields belong to the goroutine of Run.
type supervisor struct {
	Config
	heart     *os.File  // the end of the pipe to which the command writes
	pid       int       // process number of the command; 0 while it does not run
	started   time.Time // when the command was last started
	silent    int       // intervals without a heartbeat in succession
	restarts  int       // number of ends after which it was started again
	quickEnds int       // number of ends in succession: see Abandoned
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
	signals := make(chan os.Signal, 16)
	passed := append(slices.Clone(cfg.EndSignals), syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	if !signal.Ignored(syscall.SIGHUP) {
		passed = append(passed, syscall.SIGHUP)
	}
	signal.Notify(signals, passed...)
	defer signal.Stop(signals)
	heard, heart, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer heart.Close()
	defer heard.Close()
	s.heart = heart
	beats := make(chan struct{}, 1)
	go func() {
		for b := make([]byte, 64); ; {
			if _, err := heard.Read(b); err != nil {
				return // Run has ended
			}
			select {
			case beats <- struct{}{}:
			default:
			}
		}
	}()
	if err := s.start(); err != nil {
		return 0, err
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	return s.loop(signals, ended, beats), nil
}

// loop handles signals, ends of children and heartbeats until the last end of the command.
func (s *supervisor) loop(signals, ended <-chan os.Signal, beats <-chan struct{}) (code int) {
	var restart, kill <-chan time.Time
	due := time.NewTicker(beatInterval)
	defer due.Stop()
	for {
		if status, commandEnded := s.collect(); commandEnded {
			code = exitCode(status)
			if s.ending || code == 0 {
				return s.leave(code)
			}
			kill, restart = nil, time.After(s.pause(status))
		}
		select {
		case <-ended:
		case sig := <-signals:
			s.ending = s.ending || slices.Contains(s.EndSignals, sig)
			if s.pid == 0 && s.ending {
				return s.leave(code)
			}
			s.signal(sig.(syscall.Signal))
		case <-restart:
			restart = nil
			if err := s.start(); err != nil {
				s.Log.Error("starting the agent failed; retrying", "error", err)
				restart = time.After(maxPause)
			}
		case <-beats:
			s.silent = 0
		case <-due.C:
			if s.hangs() {
				kill = time.After(dumpTime)
			}
		case <-kill:
			s.signal(syscall.SIGKILL)
		}
	}
}

// hangs is called after each beatInterval. If the command hangs, it makes the command print its stacks.
func (s *supervisor) hangs() bool {
	if s.silent++; s.silent != hungBeats || s.pid == 0 {
		return false
	}
	s.Log.Error("the agent hangs: killing it", "error", fmt.Errorf("no heartbeat for %v", hungBeats*beatInterval))
	s.signal(syscall.SIGQUIT)
	return true
}

// start starts the command, in a process group of its own, so that the command gets a signal of the terminal only
// from this process, and not twice.
func (s *supervisor) start() error {
	files := []uintptr{0, 1, 2}
	for _, socket := range s.Sockets {
		files = append(files, socket.Fd())
	}
	files = append(files, s.heart.Fd())
	env := append(slices.Clone(s.Env), fmt.Sprintf("%s=%d", SocketsEnv, len(s.Sockets)), fmt.Sprintf("%s=%d", RestartsEnv, s.restarts))
	pid, err := syscall.ForkExec(s.Path, s.Args, &syscall.ProcAttr{
		Env: env, Files: files,
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM},
	})
	if err != nil {
		return fmt.Errorf("starting %s: %w", s.Path, err)
	}
	s.pid, s.started, s.silent = pid, time.Now(), 0
	return nil
}

// collect reaps all children that have ended. As process 1, this process also has orphans of other processes as its
// children. commandEnded is true if the command is one of the children that have ended. Then status is the status of
// the command.
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

// pause returns the pause before the next start of the command, and logs the reason of the
// restart.
func (s *supervisor) pause(status syscall.WaitStatus) time.Duration {
	lived := time.Since(s.started)
	if lived >= steadyAfter {
		s.quickEnds = 0
	}
	var pause time.Duration
	if s.quickEnds > 0 {
		pause = clock.BackOff(s.quickEnds-1, minPause, maxPause)
	}
	s.quickEnds++
	s.restarts++
	s.Log.Error("the agent has ended: restarting it", "how", describe(status),
		"after", lived.Round(time.Millisecond), "in", pause, "restarts", s.restarts)
	if s.quickEnds >= abandonAfter { // after each further end, too, because the command may have changed the host again
		s.abandon()
	}
	return pause
}

// abandon calls Abandoned.
func (s *supervisor) abandon() {
	if s.Abandoned != nil {
		s.Abandoned()
	}
}

// leave calls Abandoned after the last end of the command, unless the exit code is 0, and returns the exit code.
func (s *supervisor) leave(code int) int {
	if code != 0 {
		s.abandon()
	}
	return code
}

// signal sends a signal to the command. The process number of the command cannot belong to another
// process, because this process has not reaped the command yet.
func (s *supervisor) signal(sig syscall.Signal) {
	if s.pid != 0 {
		_ = unix.Kill(s.pid, sig) // fails if the command has ended
	}
}

// exitCode returns the exit code of a command. If a signal has ended the command, that is 128 plus the number of the
// signal, as in a shell.
func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// describe describes how a command has ended.
func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "signal: " + status.Signal().String()
	}
	return fmt.Sprintf("exit code %d", status.ExitStatus())
}

// Inherited returns what Run has passed to this process: the sockets, the pipe to which this process writes while it
// answers, and how often Run has restarted the command. If Run has not started this process, heart is nil.
func Inherited() (sockets []*os.File, heart *os.File, restarts int) {
	var count int
	if _, err := fmt.Sscan(os.Getenv(SocketsEnv), &count); err != nil {
		return nil, nil, 0
	}
	_, _ = fmt.Sscan(os.Getenv(RestartsEnv), &restarts) // 0 if it is not set
	for fd := firstSocket; fd <= firstSocket+count; fd++ {
		syscall.CloseOnExec(fd)
		sockets = append(sockets, os.NewFile(uintptr(fd), fmt.Sprintf("supervised descriptor %d", fd)))
	}
	return sockets[:count], sockets[count], restarts
}
