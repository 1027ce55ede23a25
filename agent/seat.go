package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/logonce"
)

// seatName is the abstract name of a unix socket. Abstract names belong to a network namespace, as the rules do.
const seatName = "@nametap-capture"

// A seat is the right to keep the rules of this network namespace. The first agent takes it by opening the socket
// seatName, and has it until it ends. Another agent would replace the rules, and both would repair them for ever. So it
// connects to the socket and waits until the connection ends. Each of the two sees the other's process.
type seat struct {
	log   *slog.Logger
	users []uint32      // the users that may have the seat: another user could keep the agent from capturing
	waits chan struct{} // closed when this agent has begun to wait

	mu    sync.Mutex
	peers map[net.Conn]string // the agents at the other ends of connections; guarded by mu
}

// take waits until this agent has the seat, and returns a function that gives it up. It also returns if a user who
// cannot have the seat uses its name, to listen or only to bind a socket. If another agent has it until ctx ends, the
// result is nil.
func (s *seat) take(ctx context.Context) (release func()) {
	ctx, cancel := context.WithCancel(ctx)
	var logged logonce.Failure
	for refused := 0; ; clock.Sleep(ctx, 50*time.Millisecond) {
		if release = s.open(ctx, cancel); release != nil || ctx.Err() != nil {
			return release
		}
		refused++
		switch conn, holder, err := s.holder(); {
		case err == nil:
			refused = 0
			if logged.Differs(errors.New(holder)) {
				s.log.Error("this agent captures nothing, because another agent captures DNS in this network namespace: end one of the two", "other", holder)
			}
			if !chans.Closed(s.waits) {
				close(s.waits)
			}
			s.follow(ctx, conn, holder)
		case !errors.Is(err, unix.ECONNREFUSED) || refused == 5: // refused: it has just ended, or it never listens
			s.log.Warn("a second agent in this network namespace would not be noticed", "error", err)
			return cancel
		}
	}
}

// open opens the socket of the seat, and returns a function that closes it. The result is nil if another process has it.
func (s *seat) open(ctx context.Context, cancel context.CancelFunc) (release func()) {
	listener, err := net.Listen("unix", seatName) //nolint:noctx // does not block
	if err != nil {
		return nil
	}
	var serving sync.WaitGroup
	serving.Go(func() { s.serve(ctx, listener, &serving) })
	return func() {
		cancel()
		_ = listener.Close()
		serving.Wait()
	}
}

// holder connects to the agent that has the seat, and describes it.
func (s *seat) holder() (conn net.Conn, text string, err error) {
	if conn, err = net.Dial("unix", seatName); err == nil { //nolint:noctx // does not block
		text, err = s.describe(conn)
	}
	return conn, text, err
}

// serve accepts the connections of agents that wait, until ctx ends and listener is closed.
func (s *seat) serve(ctx context.Context, listener net.Listener, serving *sync.WaitGroup) {
	for ctx.Err() == nil {
		conn, err := listener.Accept()
		if err != nil { // closed, or too many open files
			clock.Sleep(ctx, time.Second)
			continue
		}
		if waiter, err := s.describe(conn); err == nil { // before the next one is accepted: any user can connect
			s.log.Warn("another agent wants to capture DNS in this network namespace: end one of the two", "other", waiter)
			serving.Go(func() { s.follow(ctx, conn, waiter) })
		}
	}
}

// follow notes the process at the other end of conn, until that ends conn, or ctx ends.
func (s *seat) follow(ctx context.Context, conn net.Conn, peer string) {
	defer conn.Close()
	s.mu.Lock()
	s.peers[conn] = peer
	s.mu.Unlock()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	_, _ = io.Copy(io.Discard, conn)
	s.mu.Lock()
	delete(s.peers, conn)
	s.mu.Unlock()
}

// others returns the other agents that want the seat, or have it.
func (s *seat) others() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Values(s.peers))
}

// describe describes the process at the other end of conn. If the process may not have the seat, describe closes conn and
// returns an error.
func (s *seat) describe(conn net.Conn) (string, error) {
	peer, err := peerOf(conn)
	own := uint32(os.Getuid()) //nolint:gosec // a user
	if err == nil && peer.Uid != 0 && peer.Uid != own && !slices.Contains(s.users, peer.Uid) {
		err = fmt.Errorf("process %d of user %d uses the abstract socket %s", peer.Pid, peer.Uid, seatName)
	}
	if err != nil {
		return "", errors.Join(err, conn.Close())
	}
	if peer.Pid == 0 {
		return fmt.Sprintf("a process of user %d in another process namespace, such as a container", peer.Uid), nil
	}
	return fmt.Sprintf("process %d of user %d", peer.Pid, peer.Uid), nil
}

// peerOf returns the process and the user at the other end of conn, a unix socket.
func peerOf(conn net.Conn) (peer *unix.Ucred, err error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) //nolint:gosec // a descriptor
	return peer, errors.Join(controlErr, err)
}
