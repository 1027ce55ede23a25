package guard

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// PathEnv is the environment variable with the path of the guard's socket.
const PathEnv = "_NAMETAP_GUARD"

const (
	// Patience is how long the guard waits for a sign of life. With the time of a removal, DNS
	// is back within 2 s of the last one.
	Patience = 1500 * time.Millisecond
	// StartTime is how long signs of life of an agent that does not answer yet count.
	StartTime = 15 * time.Second
	// removeTimeout bounds a removal, and removeInterval is the time between attempts.
	removeTimeout  = 5 * time.Second
	removeInterval = time.Second
)

// A Config configures a guard.
type Config struct {
	// Path is the path of the guard's socket.
	Path string
	// FailOpen says whether rules are removed before any agent has said so.
	FailOpen bool
	// Patience is how long the guard waits for a sign of life.
	Patience time.Duration
	// Remove removes the rules. It is no error if there are none.
	Remove func(ctx context.Context) error
	// Listening is called when agents can connect. It may be nil.
	Listening func()
	// Sockets are those of the agent. At the end, what waits in them is dropped.
	Sockets []*os.File
	// Log is the log.
	Log *slog.Logger
}

// A server is one call of Run. Its fields belong to the goroutine of loop.
type server struct {
	Config
	agents   map[net.Conn]*agent
	deadline time.Time // without a sign of life, the rules are removed then
	removed  bool      // since an agent answered
	failure  string    // of the last removal; "" if it did not fail
}

// An agent is a process that is connected.
type agent struct {
	phase   Phase
	since   time.Time // of its connection
	expires time.Time // its signs of life count until then
}

// Run guards the rules until ctx ends, and then removes them unless an agent answers.
func Run(ctx context.Context, cfg Config) error {
	listener, err := listen(ctx, cfg.Path)
	if err != nil {
		return fmt.Errorf("listening for agents: %w", err)
	}
	s := &server{Config: cfg, agents: make(map[net.Conn]*agent), deadline: time.Now().Add(cfg.Patience)}
	events := make(chan event)
	watching, lost := context.WithCancelCause(ctx)
	defer lost(nil)
	accepting, stop := context.WithCancel(context.WithoutCancel(ctx))
	var goroutines sync.WaitGroup
	goroutines.Go(func() { accept(accepting, listener, events) })
	goroutines.Go(func() { watch(accepting, cfg.Path, lost) })
	defer goroutines.Wait()
	defer func() { _ = listener.Close() }()
	defer stop()
	if s.Listening != nil {
		s.Listening()
	}
	err = s.loop(watching, events)
	if cause := context.Cause(watching); ctx.Err() == nil && cause != nil {
		return errors.Join(cause, err)
	}
	return err
}

// watch calls lost when the socket is deleted, because no agent can connect any more. The next
// guard makes it again.
func watch(ctx context.Context, path string, lost context.CancelCauseFunc) {
	ticker := time.NewTicker(removeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			lost(fmt.Errorf("the socket was deleted: %w", err))
			return
		}
	}
}

// listen opens the socket, in place of that of an earlier guard. Agents need the permission to
// write to it.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	return listener, nil
}

// loop handles the agents until ctx ends.
func (s *server) loop(ctx context.Context, events <-chan event) error {
	due := time.NewTimer(s.Patience)
	defer due.Stop()
	for {
		select {
		case e := <-events:
			s.handle(e)
		case <-due.C:
			if err := s.expire(ctx); err != nil {
				due.Reset(removeInterval)
				continue
			}
		case <-ctx.Done():
			s.forgetEnded()
			if s.answering() {
				return nil
			}
			defer drain(s.Sockets)
			return s.remove(context.WithoutCancel(ctx))
		}
		due.Stop()
		if !s.removed && !s.answering() {
			due.Reset(time.Until(s.end()))
		}
	}
}

// answering reports whether an agent answers.
func (s *server) answering() bool {
	for _, a := range s.agents {
		if a.phase == Answering {
			return true
		}
	}
	return false
}

// forgetEnded forgets the agents whose end has not been read yet.
func (s *server) forgetEnded() {
	for conn := range s.agents {
		if ended(conn) {
			delete(s.agents, conn)
		}
	}
}

// end returns the time at which the rules are removed without a further sign of life.
func (s *server) end() time.Time {
	end := s.deadline
	for _, a := range s.agents {
		if a.expires.After(end) {
			end = a.expires
		}
	}
	return end
}

// handle handles a message of an agent, or its end.
func (s *server) handle(e event) {
	now := time.Now()
	known := s.agents[e.conn]
	if e.ended {
		delete(s.agents, e.conn)
		if known != nil && (known.phase == Answering || known.phase == Ending) {
			s.deadline = now.Add(s.Patience)
			s.Log.Info("the agent has ended", "waiting for the next one", s.Patience)
		}
		return
	}
	if known == nil {
		known = &agent{since: now}
	}
	if err := e.message.check(); err != nil {
		reply(e.conn, err.Error())
		_ = e.conn.Close() // the agent ends
		return
	}
	if e.message.Release {
		s.release()
		reply(e.conn, accepted)
		return
	}
	s.agents[e.conn] = known
	known.phase, s.FailOpen = e.message.Phase, e.message.FailOpen
	switch known.phase {
	case Answering:
		s.removed, s.failure = false, ""
	case Removed:
		s.removed, known.expires = true, time.Time{}
	case Ending:
		known.expires = now.Add(s.Patience)
	default:
		known.expires = now.Add(min(s.Patience, max(0, StartTime-now.Sub(known.since))))
	}
	reply(e.conn, accepted)
}

// release closes the sockets of the agent, which then has others.
func (s *server) release() {
	if len(s.Sockets) > 0 {
		s.Log.Warn("closing the previous sockets of nametap.socket: systemd has them no longer")
	}
	for _, socket := range s.Sockets {
		_ = socket.Close() // nothing reads or writes here
	}
	s.Sockets = nil
}

// expire removes the rules when no sign of life has arrived in time.
func (s *server) expire(ctx context.Context) error {
	switch {
	case s.failure != "": // a further attempt
	case s.FailOpen:
		s.Log.Warn("no agent answers: removing the capture rules, so that queries reach nameservers")
	default:
		s.Log.Warn("no agent answers; the capture rules stay because of --capture-fail-open=false: queries wait for the next one")
	}
	err := s.remove(ctx)
	switch {
	case err == nil:
		s.failure = ""
	case err.Error() != s.failure && ctx.Err() == nil:
		s.failure = err.Error()
		s.Log.Error("the capture rules cannot be removed; retrying", "error", err)
	}
	return err
}

// remove removes the rules, unless they are to stay.
func (s *server) remove(ctx context.Context) error {
	if s.removed || !s.FailOpen {
		s.removed = true
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	err := s.Remove(ctx)
	s.removed = err == nil
	return err
}

// netNS returns a text that identifies the network namespace of this process.
func netNS() (string, error) {
	var stat unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &stat); err != nil {
		return "", fmt.Errorf("reading the network namespace: %w", err)
	}
	return fmt.Sprintf("%d:%d", stat.Dev, stat.Ino), nil
}
