package listen

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// keptPrefix begins the names under which systemd keeps sockets of a [Set] with Keep; the setting follows. systemd
// passes these sockets to the next process, so no other program can take the port during a restart, and new connections
// wait. They are not in a socket unit: if another program had the port, that unit would fail, and its other sockets with
// it.
const keptPrefix = "kept-"

// Inherited has the sockets that another process has opened, or holds, for this one. Each [Set] takes its own. A nil
// Inherited has none.
type Inherited struct {
	systemd bool
	sockets []*Socket
	wanted  []string // the settings that have taken theirs
}

// Inherit returns the sockets of files, which it closes. The parameter systemd says whether they are of systemd, or
// else of a process that has opened what it could of the settings of this process. systemd sets SO_REUSEADDR on each
// socket (systemd.socket(5) has no setting for it). If two UDP sockets have this option, Linux lets any user bind the
// second one to the address and port of the first one, and the second one then receives all packets. Inherit clears the
// option. Then Linux refuses the second socket as long as any process has the first one.
func Inherit(files []*os.File, systemd bool) (*Inherited, error) {
	in := &Inherited{systemd: systemd}
	for _, file := range files {
		socket, err := socketOf(file)
		_ = file.Close() // the socket is a duplicate
		if err == nil && systemd && socket.Network == "udp" {
			err = withFD(socket, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0) })
		}
		if err != nil {
			return nil, fmt.Errorf("inherited socket %s: want a UDP socket or a listening TCP socket: %w", file.Name(), err)
		}
		socket.name = file.Name()
		in.sockets = append(in.sockets, socket)
	}
	return in, nil
}

// socketOf returns the socket of a file.
func socketOf(file *os.File) (*Socket, error) {
	if conn, err := net.FilePacketConn(file); err == nil {
		return newSocket(conn)
	}
	listener, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return newSocket(listener)
}

// Inodes returns the inodes of the sockets.
func (in *Inherited) Inodes() (map[string]bool, error) {
	inodes := map[string]bool{}
	for _, socket := range in.sockets {
		var stat unix.Stat_t
		if err := withFD(socket, func(fd int) error { return unix.Fstat(fd, &stat) }); err != nil {
			return nil, err
		}
		inodes[strconv.FormatUint(stat.Ino, 10)] = true
	}
	return inodes, nil
}

// Unit reports whether a socket unit of systemd has a UDP socket for this process.
func (in *Inherited) Unit() bool {
	return in != nil && in.systemd && slices.ContainsFunc(in.sockets, func(s *Socket) bool { return s.Network == "udp" })
}

// take takes the sockets of a [Set]. These have its port, and those that systemd has kept also its address: if the
// setting has changed since, they are closed, also by systemd. It reports whether they come from a socket unit.
func (in *Inherited) take(spec *Spec, hosts []netip.Addr, port uint16) (taken []*Socket, unit bool) {
	if in == nil {
		return nil, false
	}
	in.wanted = append(in.wanted, spec.Setting+"="+spec.Addr)
	own, stale := keptPrefix+spec.Setting, false
	in.sockets = slices.DeleteFunc(in.sockets, func(s *Socket) bool {
		addr, kept := s.AddrPort(), strings.HasPrefix(s.name, keptPrefix)
		switch {
		case kept && s.name != own, !kept && (addr.Port() != port || !slices.Contains(spec.Networks, s.Network)):
			return false
		case kept && (addr.Port() != port || !slices.Contains(hosts, addr.Addr())):
			stale = true
			_ = s.Close() // only clients of the previous address have connected
			return true
		}
		taken, unit = append(taken, s), unit || in.systemd && !kept
		return true
	})
	if stale {
		forget(own, spec.Log)
	}
	return taken, unit
}

// Close closes the sockets that no [Set] has taken, and says so: a setting has changed, and a socket unit has not. It
// returns an error for a UDP socket of a unit: that unit has the queries of clients.
func (in *Inherited) Close(log *slog.Logger) error {
	if in == nil {
		return nil
	}
	var errs []error
	for _, s := range in.sockets {
		_ = s.Close() // its other owner has a duplicate
		settings := strings.Join(in.wanted, ", ")
		switch {
		case strings.HasPrefix(s.name, keptPrefix):
			forget(s.name, log)
		case in.systemd && s.Network == "udp":
			errs = append(errs, fmt.Errorf("the socket %s of %s has another port than %s: change one of them", s.Addr, s.name, settings))
		default:
			log.Warn("an inherited socket is not used, because it has another port than the settings: change one of them",
				"socket", s.Addr, "from", s.name, "settings", settings)
		}
	}
	in.sockets = nil
	return errors.Join(errs...)
}

// keep lets systemd keep the open sockets of places, if the Set has Keep and systemd runs this process. systemd ignores
// the sockets that it has already.
func (s *Set) keep(places ...*place) {
	if !s.spec.Keep || os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	for _, p := range places {
		if p.socket == nil {
			continue
		}
		err := withFD(p.socket, func(fd int) error {
			return notifyAtOnce("FDSTORE=1\nFDNAME="+keptPrefix+s.spec.Setting, unix.UnixRights(fd))
		})
		if err != nil {
			s.spec.Log.Warn("systemd does not keep a socket while the agent restarts", "socket", p.socket.Addr, "error", err)
			continue
		}
		s.mu.Lock()
		s.held = true
		s.mu.Unlock()
	}
}

// forget makes systemd close the sockets that it has kept under name.
func forget(name string, log *slog.Logger) {
	if err := notifyAtOnce("FDSTOREREMOVE=1\nFDNAME="+name, nil); err != nil {
		log.Warn("systemd still holds sockets of previous settings", "name", name, "error", err)
	}
}

// notifyAtOnce is Notify for a start, which does not wait for systemd for long.
func notifyAtOnce(state string, rights []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return Notify(ctx, state, rights)
}

// Notify sends state to systemd, with the rights to sockets: see sd_pid_notify_with_fds(3). It does nothing if systemd
// does not run this process. While the socket of systemd is full, it waits until ctx ends.
func Notify(ctx context.Context, state string, rights []byte) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: name})
	if err != nil {
		return fmt.Errorf("notifying systemd: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetWriteDeadline(time.Now()) })()
	raw, err := conn.SyscallConn() // WriteMsgUnix needs a socket that is not connected
	if err == nil {
		writeErr := raw.Write(func(fd uintptr) bool { //nolint:forbidigo // waits only until ctx ends
			err = unix.Sendmsg(int(fd), []byte(state), rights, nil, 0) //nolint:gosec // a descriptor
			return !errors.Is(err, unix.EAGAIN)
		})
		err = cmp.Or(writeErr, err)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("notifying systemd: %w", err)
	}
	return nil
}
