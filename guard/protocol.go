package guard

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Phase is a part of the life of an agent.
type Phase string

// The phases of an agent.
const (
	Starting  Phase = "starting"
	Answering Phase = "answering" // queries
	Ending    Phase = "ending"    // the next agent answers queries
	Removed   Phase = "removed"   // the agent has removed its rules and ends
)

// A message is a line of JSON from an agent. Each gets a line as the reply: accepted, or why the
// agent is refused.
type message struct {
	Phase    Phase  `json:"phase"`
	FailOpen bool   `json:"failOpen"`
	NetNS    string `json:"netNS"`
	// Release asks the guard to close the sockets of the agent. See [Release].
	Release bool `json:"release,omitempty"`
}

const accepted = "ok"

// messageTimeout bounds the first message of an agent, and the writing of messages and replies.
const messageTimeout = time.Second

// check returns an error if the agent is refused.
func (m message) check() error {
	own, err := netNS()
	switch {
	case err != nil:
		return err
	case m.NetNS != own:
		return errors.New("the guard is in another network namespace")
	}
	return nil
}

// An event is a message of an agent, or its end.
type event struct {
	conn    net.Conn
	message message
	ended   bool
}

// reply sends a reply. If it cannot be sent, the agent has ended, or it connects again.
func reply(conn net.Conn, text string) {
	err := conn.SetWriteDeadline(time.Now().Add(messageTimeout))
	if err == nil {
		_, err = conn.Write([]byte(text + "\n"))
	}
	if err != nil {
		_ = conn.Close() // the reader sees it
	}
}

// ended reports whether the other side has closed a connection, also before all of it was read.
func ended(conn net.Conn) bool {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return true // this side has closed it
	}
	closed := false
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}} //nolint:gosec // a descriptor
		n, err := unix.Poll(fds, 0)
		closed = err == nil && n == 1
	})
	return closed || err != nil
}

// maxAgents bounds the agents that are connected. Others wait for the end of one.
const maxAgents = 64

// accept reads the messages of all agents until the listener is closed.
func accept(ctx context.Context, listener net.Listener, events chan<- event) {
	var readers sync.WaitGroup
	defer readers.Wait()
	connected := make(chan struct{}, maxAgents)
	for {
		select {
		case connected <- struct{}{}:
		case <-ctx.Done():
			return
		}
		conn, err := listener.Accept()
		if err == nil {
			readers.Go(func() {
				read(ctx, conn, events)
				<-connected
			})
			continue
		}
		<-connected
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		default: // no descriptor is free
			select {
			case <-ctx.Done():
			case <-time.After(removeInterval):
			}
		}
	}
}

// read sends the messages of an agent, and its end.
func read(ctx context.Context, conn net.Conn, events chan<- event) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	send := func(e event) {
		select {
		case events <- e:
		case <-ctx.Done():
		}
	}
	_ = conn.SetReadDeadline(time.Now().Add(messageTimeout)) // fails only on a closed connection
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		_ = conn.SetReadDeadline(time.Time{})
		e := event{conn: conn}
		if json.Unmarshal(lines.Bytes(), &e.message) != nil {
			break
		}
		send(e)
	}
	send(event{conn: conn, ended: true})
}
