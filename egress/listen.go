package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/sockets"
)

// listeners are the listeners of a server. They are safe for concurrent use.
type listeners struct {
	config   *Config
	freeBind bool        // open listeners also at addresses that this host does not have yet
	all      []*listener // does not change after open

	mu     sync.Mutex // guards the listeners in all
	closed bool       // close was called
}

// A listener is open, or missing: it could not be opened.
type listener struct {
	*net.TCPListener // nil if it is missing

	addr netip.AddrPort
	err  error // why it is missing
}

// open adopts Config.Sockets. If there are none, or if Config.OpenOthers is true, it opens the listeners of
// Config.Addr. It fails if all are missing because the address is wrong.
func (ls *listeners) open(ctx context.Context) error {
	for _, file := range ls.config.Sockets {
		found, err := net.FileListener(file)
		_ = file.Close() // found has a duplicate
		l, ok := found.(*net.TCPListener)
		if err == nil && !ok {
			err = errors.New("want TCP")
		}
		if err != nil {
			ls.close()
			return fmt.Errorf("inherited socket %s for connections to VIPs: %w", file.Name(), err)
		}
		ls.all = append(ls.all, &listener{TCPListener: l})
	}
	if len(ls.all) > 0 && !ls.config.OpenOthers {
		return nil
	}
	hosts, port, err := ls.config.listenAddrs()
	if err != nil {
		return err
	}
	var errs []error
	for _, host := range hosts {
		l := &listener{addr: netip.AddrPortFrom(host, port)}
		if slices.Contains(ls.addrs(), l.addr) {
			continue
		}
		if l.TCPListener, l.err = ls.listen(ctx, l.addr); l.err != nil {
			errs = append(errs, l.err)
		} else {
			port = addrOf(l).Port() // if the kernel chose it, the other listeners get it, too
		}
		ls.all = append(ls.all, l)
	}
	if len(ls.addrs()) == 0 && !slices.ContainsFunc(errs, func(err error) bool { return !sockets.WrongAddr(err) }) {
		return fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", ls.config.Addr, errors.Join(errs...))
	}
	for _, err := range errs {
		ls.config.Logger.Warn("degraded: connections to VIPs of one family are not carried; retrying", "error", err)
	}
	return nil
}

// listen opens a listener of this process. A listener on loopback is opened even if the host does not have the address
// yet, because IPv6 may be switched on later.
func (ls *listeners) listen(ctx context.Context, addr netip.AddrPort) (*net.TCPListener, error) {
	config := sockets.TCPConfig()
	config.KeepAlive = -1 // conn.probe sets it
	if ls.freeBind || addr.Addr().IsLoopback() {
		config.Control = sockets.FreeBind
	}
	l, err := config.Listen(ctx, fmt.Sprintf("tcp%d", family.Of(addr.Addr())), addr.String())
	if err != nil {
		return nil, err
	}
	if ls.config.Store != nil {
		ls.config.Store(l)
	}
	return l.(*net.TCPListener), nil //nolint:forcetypeassert // of network tcp
}

// await opens a missing listener as soon as that is possible. It returns false if ctx ends before.
func (ls *listeners) await(ctx context.Context, l *listener) bool {
	if l.TCPListener != nil {
		return true
	}
	if !sockets.Retry(ctx, func() error {
		opened, err := ls.listen(ctx, l.addr)
		ls.mu.Lock()
		defer ls.mu.Unlock()
		if err == nil && ls.closed {
			return opened.Close() // ctx has ended
		}
		l.TCPListener, l.err = opened, err
		return err
	}) || ctx.Err() != nil {
		return false
	}
	ls.config.Logger.Info("a missing listener for connections to VIPs is open now", "listener", l.addr)
	if ls.config.Opened != nil {
		ls.config.Opened(ls.addrs())
	}
	return true
}

// texts returns, for each missing listener that may be opened later, a text with the reason why it is missing.
func (ls *listeners) texts() (texts []string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.all {
		if l.err != nil && !sockets.WrongAddr(l.err) {
			texts = append(texts, "connections to VIPs: "+l.err.Error())
		}
	}
	return texts
}

// addrs returns the addresses of the open listeners.
func (ls *listeners) addrs() (addrs []netip.AddrPort) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.all {
		if l.TCPListener != nil {
			addrs = append(addrs, addrOf(l))
		}
	}
	return addrs
}

// addrOf returns the address of an open listener.
func addrOf(l *listener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() } //nolint:forcetypeassert // TCP

// close closes the listeners. None is opened afterwards.
func (ls *listeners) close() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, l := range ls.all {
		if l.TCPListener != nil && !ls.closed {
			_ = l.Close()
		}
	}
	ls.closed = true
}

// OpenSockets opens the listening sockets of addr, a [Config.Addr]. Another process gets them in its
// [Config.Sockets]. OpenSockets also opens sockets at addresses that this host does not have yet. If it cannot open
// a socket, it logs why. It fails if it can open no socket because the address is wrong. The caller closes the
// files.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) (files []*os.File, err error) {
	ls := &listeners{config: &Config{Addr: addr, Logger: log}, freeBind: true}
	if _, port, err := ls.config.listenAddrs(); err == nil && port == 0 {
		return nil, fmt.Errorf("egress address %q: want a port other than 0 with --supervise", addr)
	}
	defer ls.close() // the files are duplicates
	if err := ls.open(ctx); err != nil {
		return nil, err
	}
	for _, l := range ls.all {
		if l.TCPListener == nil {
			continue
		}
		file, err := l.File()
		if err != nil {
			return files, err
		}
		files = append(files, file)
	}
	return files, nil
}

// Among reports whether a socket is one that a server would open for addr, a [Config.Addr].
func Among(addr string, file *os.File) bool {
	hosts, _, err := sockets.SplitAddr("", addr)
	return err == nil && Owns(addr, file) && slices.Contains(hosts, sockets.TCPAddr(file).Addr())
}

// Owns reports whether a TCP socket listens on the port of addr, a [Config.Addr]. Such a socket comes from
// [OpenSockets], or from systemd.
func Owns(addr string, file *os.File) bool {
	_, port, err := sockets.SplitAddr("", addr)
	return err == nil && port != 0 && sockets.TCPAddr(file).Port() == port
}
