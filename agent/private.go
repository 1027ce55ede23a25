package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// runtimeDir is the directory of sockets on a host.
const runtimeDir = "/run/nametap"

// SocketDirs returns the directories in which the private socket of an agent may be. The agent uses
// the first directory that it can write to. The commands use the first directory with a socket that an agent serves:
//
//  1. the directory that systemd made for the unit (RUNTIME_DIRECTORY); for nametap.service it is
//     /run/nametap
//  2. /run/nametap, which an agent makes if it has the permission
//  3. the state directory, if there is one: in a pod with a read-only file system it is a volume
func SocketDirs(stateDir string) []string {
	var dirs []string
	unit, _, _ := strings.Cut(os.Getenv("RUNTIME_DIRECTORY"), ":") // it may be a list: see systemd.exec(5)
	for _, dir := range []string{unit, runtimeDir, stateDir} {
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// SocketPaths returns the paths that the private socket would have in dirs. The name of the socket has the port of
// the status address, so each of several agents on a host can have its own socket.
func SocketPaths(dirs []string, statusAddr string) []string {
	name := fmt.Sprintf("status-%d.sock", portOf(statusAddr))
	var paths []string
	for _, dir := range dirs {
		paths = append(paths, filepath.Join(dir, name))
	}
	return paths
}

// DialPrivate connects to the first of paths at which an agent of this container accepts this user. If there is no such
// agent, and this user has no permission for one of the sockets, the error is [fs.ErrPermission]; if there is no socket,
// it is [fs.ErrNotExist].
func DialPrivate(ctx context.Context, paths []string) (net.Conn, error) {
	var dialer net.Dialer
	var refused, forbidden error
	for _, path := range paths {
		conn, err := dialer.DialContext(ctx, "unix", path)
		switch {
		case err == nil && !inOtherContainer(conn):
			return conn, nil
		case err == nil:
			_ = conn.Close()
			refused = cmp.Or(refused, fmt.Errorf("%s is the socket of an agent in another container", path))
		case errors.Is(err, fs.ErrPermission):
			forbidden = cmp.Or(forbidden, fmt.Errorf("only root and the user of the agent may use %s: %w", path, err))
		case !errors.Is(err, fs.ErrNotExist):
			refused = cmp.Or(refused, err)
		}
	}
	if err := cmp.Or(forbidden, refused); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("there is no socket at %s: %w", strings.Join(paths, " or "), fs.ErrNotExist)
}

// inOtherContainer reports whether the process at the other end of a unix socket is in a process namespace that this
// process does not see: containers may share the directory of the socket.
func inOtherContainer(conn net.Conn) bool {
	peer, err := peerOf(conn)
	return err == nil && peer.Pid == 0
}

// listenPrivate opens a socket at the first of paths whose directory this user can write to, unless an agent in another
// container has it. It replaces the socket of an agent that was killed.
func listenPrivate(paths []string) (net.Listener, error) {
	var errs []error
	for _, path := range paths {
		listener, err := listenAt(path)
		if err == nil || errors.Is(err, unix.EADDRINUSE) {
			return listener, err
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// listenAt opens a socket at path.
func listenAt(path string) (net.Listener, error) {
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // the socket is private
		return nil, err
	}
	conn, err := net.Dial("unix", path) //nolint:noctx // does not block
	switch {
	case err == nil:
		defer conn.Close()
		if inOtherContainer(conn) {
			return nil, fmt.Errorf("an agent in another container serves %s", path)
		}
		return nil, fmt.Errorf("another agent serves %s: %w", path, unix.EADDRINUSE)
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, fs.ErrPermission): // the socket is left from an agent that has ended, perhaps of another user
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	listener, err := net.Listen("unix", path) //nolint:noctx // does not block
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = listener.Close()
		return nil, err
	}
	return listener, nil
}

// peerKey is the key of a value in the context of a connection: the error that says why the client is refused.
type peerKey struct{}

// notePeer is the ConnContext of a server on a unix socket. If the client may not use the socket, it adds the reason to
// the context.
func notePeer(ctx context.Context, conn net.Conn) context.Context {
	if err := checkPeer(conn.(interface{ NetConn() net.Conn }).NetConn()); err != nil {
		return context.WithValue(ctx, peerKey{}, err)
	}
	return ctx
}

// checkPeer returns an error unless the client of a connection runs as root or as the user of this process.
func checkPeer(conn net.Conn) error {
	peer, err := peerOf(conn)
	if err != nil {
		return err
	}
	if own := uint32(os.Getuid()); peer.Uid != 0 && peer.Uid != own { //nolint:gosec // a user
		return fmt.Errorf("for root and user %d only, not for user %d", own, peer.Uid)
	}
	return nil
}

// peerOf returns the process and the user at the other end of a unix socket.
func peerOf(conn net.Conn) (peer *unix.Ucred, err error) {
	socket, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%T is not a unix socket", conn)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) //nolint:gosec // a descriptor
	if err = cmp.Or(controlErr, os.NewSyscallError("reading the user of a client", err)); err != nil {
		return nil, err
	}
	return peer, nil
}

// peersOnly returns a handler that refuses clients for which notePeer has added a reason to the context.
func peersOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err, refused := r.Context().Value(peerKey{}).(error); refused {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}
