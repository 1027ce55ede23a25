package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A service runs a command, and again whenever it ends, like a unit with Restart=always.
type service struct {
	name    string
	command func() *exec.Cmd
	ns      *netns.NS
	output  *os.File
	ended   chan struct{} // closed when the service was stopped

	mu      sync.Mutex
	pid     int // 0 while it does not run
	starts  int
	started time.Time     // the last time
	pause   time.Duration // before the next start
	change  chan struct{} // closed when pid has changed

	stopping     context.Context // ends when the service is to end
	stopStarting context.CancelFunc
}

// startService starts a service, which is killed after the test unless it was stopped. Its
// output is in a file of the world's directory.
func (w *world) startService(name string, ns *netns.NS, command func() *exec.Cmd) *service {
	w.tb.Helper()
	output, err := os.Create(filepath.Join(w.dir, name+".log"))
	if err != nil {
		w.tb.Fatal(err)
	}
	s := &service{name: name, command: command, ns: ns, output: output, ended: make(chan struct{}), change: make(chan struct{})}
	s.stopping, s.stopStarting = context.WithCancel(context.WithoutCancel(w.tb.Context()))
	w.tb.Cleanup(func() {
		s.stop(syscall.SIGKILL)
		output.Close()
	})
	go s.run(w.tb.Errorf)
	return s
}

// run starts the command until the service is stopped. It calls fail if it cannot.
func (s *service) run(fail func(format string, args ...any)) {
	defer close(s.ended)
	// The kernel kills the command when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		s.mu.Lock()
		if s.stopping.Err() != nil {
			s.mu.Unlock()
			return
		}
		cmd := s.command()
		cmd.Stdout, cmd.Stderr = s.output, s.output
		if err := s.ns.Start(cmd); err != nil {
			s.mu.Unlock()
			fail("starting %s: %v", s.name, err)
			return
		}
		s.starts++
		s.setLocked(cmd.Process.Pid)
		s.mu.Unlock()
		_ = cmd.Wait() // how it ended is in its log
		s.mu.Lock()
		s.setLocked(0)
		pause := s.pause
		s.mu.Unlock()
		clock.Sleep(s.stopping, pause)
	}
}

// setLocked sets pid.
func (s *service) setLocked(pid int) {
	s.pid = pid
	if pid != 0 {
		s.started = time.Now()
	}
	close(s.change)
	s.change = make(chan struct{})
}

// running returns the process and how often the service was started.
func (s *service) running() (pid, starts int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pid, s.starts
}

// lastStart returns when the process was started, or the previous one if none runs.
func (s *service) lastStart() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// signal sends a signal to the process. After its end, if any, the service waits for pause.
// It returns the channel that is closed at the next start or end.
func (s *service) signal(signal syscall.Signal, pause time.Duration) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause = pause
	if s.pid != 0 {
		_ = syscall.Kill(s.pid, signal) // it has not been waited for
	}
	return s.change
}

// restart ends the process with a signal and returns when the next one runs, or ctx ends.
func (s *service) restart(ctx context.Context, signal syscall.Signal, pause time.Duration) {
	_, before := s.running()
	changed := s.signal(signal, pause)
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		changed = s.change
		again := s.starts > before
		s.mu.Unlock()
		if again {
			return
		}
	}
}

// stop ends the service.
func (s *service) stop(signal syscall.Signal) {
	s.mu.Lock()
	s.stopStarting()
	s.mu.Unlock()
	s.signal(signal, 0)
	select {
	case <-s.ended:
	case <-time.After(wait.Limit):
		s.signal(syscall.SIGKILL, 0)
		<-s.ended
	}
}

// restartPause is RestartSec of nametap.service.
const restartPause = 100 * time.Millisecond

// leaseTime is how long the rules capture after the last answer of an agent.
const leaseTime = 2 * time.Second

// disturbAgent restarts, kills and stops the agent at random times.
func (w *world) disturbAgent(ctx context.Context, random *rand.Rand) {
	for clock.Sleep(ctx, between(random, 4*time.Second, 12*time.Second)) {
		thaw := w.tables.freeze()
		switch kind := random.IntN(10); {
		case kind < 4:
			w.timeline.note("the agent is restarted")
			w.tables.restarted()
			began := time.Now()
			w.agent.restart(ctx, syscall.SIGUSR1, restartPause)
			w.timeline.withoutAgent(began, time.Now())
		case kind < 7:
			w.killAgent(ctx)
		case kind < 8: // also while it starts
			w.killAgent(ctx)
			if clock.Sleep(ctx, between(random, 0, 300*time.Millisecond)) {
				w.killAgent(ctx)
			}
		default:
			d := between(random, 100*time.Millisecond, 3*time.Second)
			w.timeline.note(fmt.Sprintf("the agent is stopped for %v", d))
			began := time.Now()
			w.agent.signal(syscall.SIGSTOP, restartPause)
			clock.Sleep(ctx, d)
			w.agent.signal(syscall.SIGCONT, restartPause)
			w.timeline.withoutAgent(began, time.Now())
			w.timeline.add(outage{what: "forwarded, while the agent was stopped", from: began, until: time.Now(), covers: stopped})
			// The kernel ends the capture when no agent has answered for the time of a lease. The agent probes its way
			// four times in it.
			w.timeline.add(outage{what: "mesh names, while the agent was stopped", from: began.Add(leaseTime * 3 / 4),
				until: time.Now().Add(leaseTime / 2), covers: pastAgent})
		}
		w.tables.restarted() // the previous agent has answered until now
		thaw()
	}
}

// killAgent kills the agent and returns when the next one runs.
func (w *world) killAgent(ctx context.Context) {
	w.tables.restarted()
	now := time.Now()
	w.agent.restart(ctx, syscall.SIGKILL, restartPause)
	w.timeline.withoutAgent(now, time.Now())
	until := now.Add(50 * time.Millisecond)
	w.timeline.add(outage{what: "mesh names, in flight when the agent was killed", from: now, until: until, covers: inFlight(now, true)})
	w.timeline.add(outage{what: "forwarded, in flight when the agent was killed", from: now, until: until, covers: inFlight(now, false)})
	w.timeline.note("the agent was killed")
}
