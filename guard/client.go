package guard

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"
)

const (
	// signInterval is the time between signs of life, and between attempts to connect. It is
	// far less than Patience, so that a guard that was restarted finds the agent.
	signInterval = 250 * time.Millisecond
	// replyTimeout bounds the guard's reply. A guard that removes rules replies late.
	replyTimeout = removeTimeout + messageTimeout
)

// A Client is an agent's connection to the guard. Its methods are safe for concurrent use.
type Client struct {
	path   string
	log    *slog.Logger
	change chan struct{} // receives when the state changed
	noted  chan struct{} // receives when told changed

	mu    sync.Mutex
	state message // guarded by mu; what to tell the guard
	told  message // guarded by mu; what the guard has accepted last; zero if not connected
}

// NewClient returns a client, in the phase Starting, of the guard at a path.
func NewClient(path string, log *slog.Logger) *Client {
	return &Client{
		path: path, log: log, change: make(chan struct{}, 1), noted: make(chan struct{}, 1),
		state: message{Phase: Starting},
	}
}

// SetFailOpen says whether the guard removes the rules when the agent has ended.
func (c *Client) SetFailOpen(failOpen bool) {
	c.set(func(m *message) { m.FailOpen = failOpen })
}

// Enter enters a phase.
func (c *Client) Enter(p Phase) {
	c.set(func(m *message) { m.Phase = p })
}

// Await returns when the guard has noted a phase that was entered, or when ctx ends. It must not
// be called concurrently.
func (c *Client) Await(ctx context.Context, p Phase) {
	for !c.isIn(p) {
		select {
		case <-c.noted:
		case <-ctx.Done():
			return
		}
	}
}

// set changes the state.
func (c *Client) set(change func(*message)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	previous := c.state
	if change(&c.state); c.state != previous {
		wake(c.change)
	}
}

// wake sends to a channel unless it has a value already.
func wake(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// Held reports whether the guard removes the rules if the agent ends now and no other follows.
func (c *Client) Held() bool { return c.isIn(Answering) }

// Waits reports whether the agent answers and the guard does not know it.
func (c *Client) Waits() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.Phase == Answering && c.told.Phase != Answering
}

// isIn reports whether the guard has noted a phase last.
func (c *Client) isIn(p Phase) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.told.Phase == p
}

// Run stays connected to the guard until ctx ends. The first attempts follow each other closely
// and log nothing, because systemd starts the guard at the same time, and restarts it at once.
// Then it logs the first of several errors.
func (c *Client) Run(ctx context.Context) {
	const shortest = signInterval / 16
	pause, logged := shortest, ""
	for ctx.Err() == nil {
		err := c.stay(ctx, func() { pause, logged = shortest, "" })
		c.note(message{})
		if ctx.Err() != nil {
			return
		}
		if text := err.Error(); text != logged && pause == signInterval {
			logged = text
			c.log.Warn("nametap-guard cannot be reached, and capture does not begin without it; retrying", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, signInterval)
	}
}

// stay connects to the guard, calls connected, and returns when the connection has ended.
func (c *Client) stay(ctx context.Context, connected func()) error {
	namespace, err := netNS()
	if err != nil {
		return err
	}
	conn, err := (&net.Dialer{Timeout: messageTimeout}).DialContext(ctx, "unix", c.path)
	if err != nil {
		return err
	}
	var reader sync.WaitGroup
	defer reader.Wait()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	replies := make(chan string, 1)
	reader.Go(func() {
		defer close(replies)
		for lines := bufio.NewScanner(conn); lines.Scan(); {
			replies <- lines.Text() // one for each message
		}
	})
	for first := true; ; first = false {
		m := c.current()
		m.NetNS = namespace
		if err := exchange(conn, replies, m); err != nil {
			return err
		}
		c.note(m)
		if first {
			connected()
		}
		var sign <-chan time.Time
		if m.Phase != Answering {
			sign = time.After(signInterval)
		}
		select {
		case <-c.change:
		case <-sign:
		case <-replies:
			return errEnded
		}
	}
}

var errEnded = errors.New("it has ended")

// exchange sends a message, and returns nil if the guard accepts the agent.
func exchange(conn net.Conn, replies <-chan string, m message) error {
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return err
	}
	select {
	case reply, ok := <-replies:
		switch {
		case !ok:
			return errEnded
		case reply != accepted:
			return fmt.Errorf("it refuses: %s", reply)
		}
		return nil
	case <-time.After(replyTimeout):
		return errors.New("it does not reply")
	}
}

// current returns the state.
func (c *Client) current() message {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// note records what the guard has accepted: zero if it cannot be reached.
func (c *Client) note(told message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = told
	wake(c.noted)
}

// Release asks the guard at a path to close the sockets that it has of the agent. An agent to which
// systemd gives no sockets opens its own, at the same addresses.
func Release(ctx context.Context, path string) error {
	namespace, err := netNS()
	if err != nil {
		return err
	}
	conn, err := (&net.Dialer{Timeout: messageTimeout}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // the reply has arrived, or never will
	if err := conn.SetReadDeadline(time.Now().Add(messageTimeout)); err != nil {
		return err
	}
	var reader sync.WaitGroup
	defer reader.Wait()
	replies := make(chan string, 1)
	reader.Go(func() {
		defer close(replies)
		if lines := bufio.NewScanner(conn); lines.Scan() {
			replies <- lines.Text()
		}
	})
	return exchange(conn, replies, message{Phase: Starting, NetNS: namespace, Release: true})
}
