package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/sockets"
)

// A listener is a listening socket that Go's runtime does not watch.
type listener struct {
	fd   int
	addr netip.AddrPort
}

// listeners are the listeners of a server. They are safe for concurrent use.
type listeners struct {
	config *Config

	mu      sync.Mutex
	opened  []listener
	missing map[netip.AddrPort]error // the listeners that could not be opened, and why
	closed  bool                     // close was called
}

// open adopts Config.Sockets. If there are none, or if Config.OpenOthers is true, it opens the listeners of
// Config.Addr, and records the listeners that it cannot open as missing. It fails if all are missing because the
// address is wrong. A listener on loopback is opened even if the host does not have the address yet, because IPv6
// may be switched on later.
func (ls *listeners) open(ctx context.Context) error {
	if err := ls.adopt(); err != nil {
		return err
	}
	if len(ls.opened) > 0 && !ls.config.OpenOthers {
		return nil
	}
	hosts, port, err := ls.config.listenAddrs()
	if err != nil {
		return err
	}
	ls.missing = map[netip.AddrPort]error{}
	var errs []error
	for _, host := range hosts {
		addr := netip.AddrPortFrom(host, port)
		if slices.Contains(ls.addrs(), addr) {
			continue
		}
		l, err := ls.openOne(ctx, addr)
		if err != nil {
			errs = append(errs, err)
			ls.missing[addr] = err
			continue
		}
		ls.opened = append(ls.opened, l)
		if port == 0 { // the other listeners get the port that the kernel chose for the first
			port = l.addr.Port()
		}
	}
	if len(ls.opened) == 0 && !slices.ContainsFunc(errs, mayPass) {
		return fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", ls.config.Addr, errors.Join(errs...))
	}
	logMissing(ls.config.Logger, errs)
	return nil
}

// adopt takes over the sockets of another process.
func (ls *listeners) adopt() error {
	for _, file := range ls.config.Sockets {
		l, err := detached(net.FileListener(file))
		_ = file.Close() // l has a duplicate
		if err != nil {
			ls.close()
			return fmt.Errorf("inherited socket %s for connections to VIPs: %w", file.Name(), err)
		}
		ls.opened = append(ls.opened, l)
	}
	return nil
}

// openOne opens one listener of this process.
func (ls *listeners) openOne(ctx context.Context, addr netip.AddrPort) (listener, error) {
	var control func(string, string, syscall.RawConn) error
	if addr.Addr().IsLoopback() {
		control = sockets.FreeBind
	}
	l, err := listenOn(ctx, addr, control)
	if err == nil && ls.config.Store != nil {
		ls.config.Store(l)
	}
	return detached(l, err)
}

// detached returns a duplicate of l that Go's runtime does not watch, and closes l. If the runtime watched the
// socket, each new client would also wake the runtime. If err is not nil, detached returns it.
func detached(l net.Listener, err error) (listener, error) {
	if err != nil {
		return listener{}, err
	}
	defer func() { _ = l.Close() }() // found has a duplicate
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return listener{}, errors.New("want TCP")
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return listener{}, err
	}
	found := listener{addr: tcp.Addr().(*net.TCPAddr).AddrPort()}
	controlErr := raw.Control(func(fd uintptr) {
		found.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) //nolint:gosec // a descriptor; connections inherit it
	})
	return found, errors.Join(controlErr, err)
}

// openMissing tries to open the missing listeners until all are open or ctx ends. It calls the function accept with
// each listener that it has opened.
func (ls *listeners) openMissing(ctx context.Context, accept func(listener)) {
	if len(ls.unserved()) == 0 {
		return
	}
	sockets.Retry(ctx, func() (last error) {
		for addr := range ls.unserved() {
			l, err := ls.openOne(ctx, addr)
			if err != nil {
				last = err
			}
			if ls.add(addr, l, err) {
				ls.config.Logger.Info("a missing listener for connections to VIPs is open now", "listener", addr)
				accept(l)
				if ls.config.Opened != nil {
					ls.config.Opened(ls.addrs())
				}
			}
		}
		return last
	})
}

// add records the result of opening a missing listener. It reports whether the listener is to be served.
func (ls *listeners) add(addr netip.AddrPort, l listener, err error) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	switch {
	case err != nil:
		ls.missing[addr] = err
		return false
	case ls.closed:
		_ = unix.Close(l.fd) // clients that have connected are reset
		return false
	}
	delete(ls.missing, addr)
	ls.opened = append(ls.opened, l)
	return true
}

// unserved returns the missing listeners, and why each is missing.
func (ls *listeners) unserved() map[netip.AddrPort]error {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return maps.Clone(ls.missing)
}

// texts returns, for each missing listener that may be opened later, a text with the reason why it is missing.
func (ls *listeners) texts() (texts []string) {
	for _, err := range ls.unserved() {
		if mayPass(err) {
			texts = append(texts, "connections to VIPs: "+err.Error())
		}
	}
	slices.Sort(texts)
	return texts
}

// addrs returns the addresses of the open listeners.
func (ls *listeners) addrs() (addrs []netip.AddrPort) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.opened {
		addrs = append(addrs, l.addr)
	}
	return addrs
}

// close closes the listeners. None is opened afterwards.
func (ls *listeners) close() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.closed {
		return
	}
	ls.closed = true
	for _, l := range ls.opened {
		_ = unix.Close(l.fd)
	}
}

// mayPass reports whether a listener that could not be opened because of err may be opened later with the same
// settings.
func mayPass(err error) bool { return !sockets.WrongAddr(err) }

// logMissing logs why listeners are missing.
func logMissing(log *slog.Logger, errs []error) {
	for _, err := range errs {
		log.Warn("degraded: connections to VIPs of one family are not carried; retrying", "error", err)
	}
}

// listenOn opens one listener.
func listenOn(ctx context.Context, addr netip.AddrPort, control func(string, string, syscall.RawConn) error) (*net.TCPListener, error) {
	config := sockets.TCPConfig()
	config.KeepAlive = -1 // pair.probe sets it
	config.Control = control
	l, err := config.Listen(ctx, fmt.Sprintf("tcp%d", family.Of(addr.Addr())), addr.String())
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// OpenSockets opens the listening sockets of addr, a [Config.Addr]. Another process gets them in its
// [Config.Sockets]. OpenSockets also opens sockets at addresses that this host does not have yet. If it cannot open
// a socket, it logs why. It fails if it can open no socket because the address is wrong. The caller closes the
// files.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) ([]*os.File, error) {
	cfg := Config{Addr: addr}
	hosts, port, err := cfg.listenAddrs()
	if err != nil {
		return nil, err
	}
	if port == 0 {
		return nil, fmt.Errorf("egress address %q: want a port other than 0 with --supervise", addr)
	}
	var files []*os.File
	var errs []error
	for _, host := range hosts {
		file, err := openSocket(ctx, netip.AddrPortFrom(host, port))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		files = append(files, file)
	}
	if len(files) == 0 && !slices.ContainsFunc(errs, mayPass) {
		return nil, fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", addr, errors.Join(errs...))
	}
	logMissing(log, errs)
	return files, nil
}

// openSocket opens one listening socket as a file.
func openSocket(ctx context.Context, addr netip.AddrPort) (*os.File, error) {
	listener, err := listenOn(ctx, addr, sockets.FreeBind)
	if err != nil {
		return nil, err
	}
	defer func() { _ = listener.Close() }() // the file is a duplicate
	return listener.File()
}

// Among reports whether a socket is one that a server would open for addr, a [Config.Addr].
func Among(addr string, file *os.File) bool {
	cfg := Config{Addr: addr}
	hosts, port, err := cfg.listenAddrs()
	bound := sockets.TCPAddr(file)
	return err == nil && port != 0 && bound.Port() == port && slices.Contains(hosts, bound.Addr())
}

// Owns reports whether a TCP socket listens on the port of addr, a [Config.Addr]. Such a socket comes from
// [OpenSockets], or from systemd.
func Owns(addr string, file *os.File) bool {
	cfg := Config{Addr: addr}
	_, port, err := cfg.listenAddrs()
	if err != nil {
		return false
	}
	return port != 0 && sockets.TCPAddr(file).Port() == port
}
