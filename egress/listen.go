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

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/sockets"
)

// listeners are the listeners of a server. They are safe for concurrent use.
type listeners struct {
	config   *Config
	freeBind bool // open listeners also at addresses that this host does not have yet

	mu      sync.Mutex
	opened  []*net.TCPListener
	missing map[netip.AddrPort]error // the listeners that could not be opened, and why
	closed  bool                     // close was called
}

// open adopts Config.Sockets. If there are none, or if Config.OpenOthers is true, it opens the listeners of
// Config.Addr, and records the listeners that it cannot open as missing. It fails if all are missing because the
// address is wrong.
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
			ls.missing[addr], errs = err, append(errs, err)
			continue
		}
		ls.opened = append(ls.opened, l)
		port = addrOf(l).Port() // if the kernel chose it, the other listeners get it, too
	}
	if len(ls.opened) == 0 && !slices.ContainsFunc(errs, mayPass) {
		return fmt.Errorf("listening for connections to VIPs on %s (--egress-addr): %w", ls.config.Addr, errors.Join(errs...))
	}
	for _, err := range errs {
		ls.config.Logger.Warn("degraded: connections to VIPs of one family are not carried; retrying", "error", err)
	}
	return nil
}

// adopt takes over the sockets of another process.
func (ls *listeners) adopt() error {
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
		ls.opened = append(ls.opened, l)
	}
	return nil
}

// openOne opens one listener of this process. A listener on loopback is opened even if the host does not have the address
// yet, because IPv6 may be switched on later.
func (ls *listeners) openOne(ctx context.Context, addr netip.AddrPort) (*net.TCPListener, error) {
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

// openMissing tries to open the missing listeners until all are open or ctx ends. It calls the function accept with
// each listener that it has opened.
func (ls *listeners) openMissing(ctx context.Context, accept func(*net.TCPListener)) {
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
func (ls *listeners) add(addr netip.AddrPort, l *net.TCPListener, err error) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	switch {
	case err != nil:
		ls.missing[addr] = err
		return false
	case ls.closed:
		_ = l.Close() // clients that have connected are reset
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
		addrs = append(addrs, addrOf(l))
	}
	return addrs
}

// addrOf returns the address of a listener.
func addrOf(l *net.TCPListener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() } //nolint:forcetypeassert // TCP

// close closes the listeners. None is opened afterwards.
func (ls *listeners) close() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.closed {
		return
	}
	ls.closed = true
	for _, l := range ls.opened {
		_ = l.Close()
	}
}

// mayPass reports whether a listener that could not be opened because of err may be opened later with the same
// settings.
func mayPass(err error) bool { return !sockets.WrongAddr(err) }

// OpenSockets opens the listening sockets of addr, a [Config.Addr]. Another process gets them in its
// [Config.Sockets]. OpenSockets also opens sockets at addresses that this host does not have yet. If it cannot open
// a socket, it logs why. It fails if it can open no socket because the address is wrong. The caller closes the
// files.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) ([]*os.File, error) {
	ls := &listeners{config: &Config{Addr: addr, Logger: log}, freeBind: true}
	if _, port, err := ls.config.listenAddrs(); err == nil && port == 0 {
		return nil, fmt.Errorf("egress address %q: want a port other than 0 with --supervise", addr)
	}
	defer ls.close() // the files are duplicates
	if err := ls.open(ctx); err != nil {
		return nil, err
	}
	var files []*os.File
	for _, l := range ls.opened {
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
	return err == nil && port != 0 && sockets.TCPAddr(file).Port() == port
}
