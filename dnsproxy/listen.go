package dnsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/sockets"
)

// addrSetting names [Config.Addr] in errors.
const addrSetting = "dns-addr"

// If Config.Addr has port 0, the kernel chooses the port of the first socket. This port may not be free for the other
// sockets; then another port is tried, up to portAttempts times.
const portAttempts = 10

// A missingListener is a listener that could not be opened, and why.
type missingListener struct {
	network string
	addr    netip.AddrPort
	err     error
}

// listeners opens the sockets of a Server and serves them.
type listeners struct {
	config  *Config
	handler *front
	limit   *connlimit.Limit // of all TCP listeners; nil before open is called

	mu      sync.Mutex
	opened  []listener // IPv4 before IPv6, UDP before TCP
	missing []missingListener
	stopped bool // run has stopped all listeners
}

// open opens UDP and TCP sockets on every address of [Config.Addr], all on one port. If there are [Config.Sockets],
// open uses these sockets instead, and opens others only if [Config.OpenOthers] is set. It logs the sockets that it
// could not open, and fails if there is no socket.
func (ls *listeners) open(ctx context.Context) error {
	hosts, port, err := sockets.SplitAddr(addrSetting, ls.config.Addr)
	if err != nil {
		return err
	}
	ls.limit = newLimit(ls.config.MaxTCPConns, ls.config.Logger)
	if ls.config.Registerer != nil {
		ls.config.Registerer.MustRegister(ls.limit.Metric())
	}
	var missing []missingListener
	if ls.opened, err = ls.adopt(port); err == nil && (len(ls.opened) == 0 || ls.config.OpenOthers) {
		ls.opened, missing, err = ls.openOnOnePort(ctx, hosts, port)
	}
	if err != nil {
		ls.close()
		return err
	}
	ls.changed()
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.missing = missing
	return nil
}

// unopened returns a reason for each listener that is missing. It leaves out listeners of a family that the host does
// not have.
func (ls *listeners) unopened() (reasons []string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for _, m := range ls.missing {
		if !noFamily(m.err) {
			reasons = append(reasons, m.err.Error())
		}
	}
	return reasons
}

// close releases spare descriptors. It must be called after all listeners have ended.
func (ls *listeners) close() { ls.limit.Close() }

// openOnOnePort opens all sockets of [Config.Addr] that are not among [Config.Sockets]. All sockets have the same port.
// If port is 0, the kernel chooses a port for the first socket. If this port is not free for the others, openOnOnePort
// starts again with another port.
func (ls *listeners) openOnOnePort(
	ctx context.Context, hosts []netip.Addr, port uint16,
) ([]listener, []missingListener, error) {
	opened, missing, err := ls.openAll(ctx, hosts, port)
	for range portAttempts {
		if port != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
		for _, l := range opened {
			l.close()
		}
		opened, missing, err = ls.openAll(ctx, hosts, port)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w: want another port (--%s), which the capture rules redirect port 53 to, or the capability "+
			"CAP_NET_BIND_SERVICE", err, addrSetting)
	}
	if len(opened) == 0 {
		return nil, nil, fmt.Errorf("opening a DNS listener on %s: %w", ls.config.Addr, err)
	}
	ls.logMissing(missing)
	return opened, missing, nil
}

// run serves the listeners on goroutines of group, and opens the missing ones. When ctx ends, run stops all
// listeners. Each listener ends after it has answered the queries that it has read.
func (ls *listeners) run(ctx context.Context, group *errgroup.Group) {
	for _, l := range ls.opened {
		group.Go(l.serve)
	}
	group.Go(func() error {
		ls.openMissing(ctx, group)
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		ls.mu.Lock()
		defer ls.mu.Unlock()
		ls.stopped = true
		for _, l := range ls.opened {
			l.stop()
		}
		return nil
	})
}

// addrs returns the addresses of the open listeners.
func (ls *listeners) addrs() []Addr {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	addrs := make([]Addr, len(ls.opened))
	for i, l := range ls.opened {
		addrs[i] = l.addr()
	}
	return addrs
}

// changed is called when a listener has been opened. It sets the metric of open listeners, and gives the forwarder
// their addresses. The forwarder must not ask a nameserver at such an address, because it is this agent.
func (ls *listeners) changed() {
	var agentAddrs []netip.AddrPort
	all := ls.addrs()
	for _, a := range all {
		if addr, err := netip.ParseAddrPort(a.Address); err == nil { // always, for a listener
			agentAddrs = append(agentAddrs, addr)
		}
	}
	ls.handler.metrics.listeners.Set(float64(len(all)))
	ls.handler.forwarder.SetListeners(agentAddrs)
}

// logMissing logs the listeners that could not be opened, as a warning unless the host lacks their family.
func (ls *listeners) logMissing(missing []missingListener) {
	for _, m := range missing {
		if noFamily(m.err) {
			ls.config.Logger.Info("a DNS listener waits until this host has its address", "error", m.err)
			continue
		}
		ls.config.Logger.Warn("degraded: a DNS listener cannot be opened; retrying", "error", m.err)
	}
}

// noFamily reports whether err, from opening a listener, means that the host has no address of the family. For
// example, IPv6 may be switched off.
func noFamily(err error) bool {
	return errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.EAFNOSUPPORT)
}

// reopenInterval is the time between attempts to open missing listeners.
const reopenInterval = time.Second

// openMissing tries again and again to open the missing listeners, until all are open or ctx ends. For example, the
// host may get IPv6 later.
func (ls *listeners) openMissing(ctx context.Context, group *errgroup.Group) {
	ticker := time.NewTicker(reopenInterval)
	defer ticker.Stop()
	for missing := ls.missing; len(missing) > 0; { // only this goroutine changes ls.missing
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		var left []missingListener
		for _, m := range missing {
			if l, err := ls.openOne(ctx, m.network, m.addr); err != nil {
				left = append(left, m)
			} else {
				ls.add(group, l)
			}
		}
		missing = left
		ls.mu.Lock()
		ls.missing = left
		ls.mu.Unlock()
	}
}

// add begins to serve a listener that was missing, on a goroutine of group. If run has stopped the other listeners,
// add closes it.
func (ls *listeners) add(group *errgroup.Group, l listener) {
	ls.mu.Lock()
	if ls.stopped {
		ls.mu.Unlock()
		l.close()
		return
	}
	ls.opened = append(ls.opened, l)
	slices.SortStableFunc(ls.opened, func(a, b listener) int { return cmp.Compare(sortKey(a.addr()), sortKey(b.addr())) })
	group.Go(l.serve)
	ls.mu.Unlock()
	ls.config.Logger.Info("a missing DNS listener is open now", "listener", l.addr())
	ls.changed()
}

// openAll opens the UDP and TCP sockets of every host that are not open yet. It returns all open listeners, also those
// that were open before. It also returns the listeners that it could not open, and the joined errors of opening them.
func (ls *listeners) openAll(
	ctx context.Context, hosts []netip.Addr, port uint16,
) (listeners []listener, missing []missingListener, err error) {
	listeners = slices.Clone(ls.opened)
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			addr := netip.AddrPortFrom(host, port)
			wanted := Addr{Network: network, Address: addr.String()}
			if slices.ContainsFunc(ls.opened, func(l listener) bool { return l.addr() == wanted }) {
				continue
			}
			l, openErr := ls.openOne(ctx, network, addr)
			if openErr != nil {
				missing = append(missing, missingListener{network, addr, openErr})
				err = errors.Join(err, openErr)
				continue
			}
			listeners = append(listeners, l)
			if port == 0 { // the kernel has chosen a port; the other sockets get the same one
				port = l.addr().port()
			}
		}
	}
	for i := range missing {
		missing[i].addr = netip.AddrPortFrom(missing[i].addr.Addr(), port)
	}
	return listeners, missing, err
}

// openOne opens one socket; for port 0 the kernel chooses a port.
func (ls *listeners) openOne(ctx context.Context, network string, addr netip.AddrPort) (listener, error) {
	if network == "udp" {
		return listenUDP(ctx, ls.handler, addr)
	}
	config := tcpConfig()
	opened, err := config.Listen(ctx, network+familyOf(addr), addr.String())
	if err != nil {
		return nil, err
	}
	return ls.tcpListener(opened)
}

// tcpConfig returns how TCP sockets are opened. They have no keepalive, because idle connections are closed
// long before the first probe.
func tcpConfig() net.ListenConfig {
	config := sockets.TCPConfig()
	config.KeepAlive = -1
	return config
}

// tcpListener returns the listener of an open socket. It closes the socket on an error.
func (ls *listeners) tcpListener(opened net.Listener) (listener, error) {
	tcp, ok := opened.(*net.TCPListener)
	if !ok {
		_ = opened.Close() // no connection was accepted
		return nil, fmt.Errorf("listening on %s %s: %T is not a TCP socket", opened.Addr().Network(), opened.Addr(), opened)
	}
	return newTCPListener(ls.handler, tcp, ls.limit), nil
}

// OpenSockets opens UDP and TCP sockets on every address of addr, which has the form of [Config.Addr]. The files are
// for [Config.Sockets] of this or another process. The caller must close them. For localhost, OpenSockets also opens
// the sockets of a disabled family; they receive queries once the family is enabled. It logs the sockets that it
// cannot open, and fails if it can open none.
func OpenSockets(ctx context.Context, addr string, log *slog.Logger) (files []*os.File, err error) {
	hosts, port, err := sockets.SplitAddr(addrSetting, addr)
	if err != nil {
		return nil, err
	}
	if port == 0 {
		return nil, fmt.Errorf("DNS address %q: want a port other than 0 with --supervise", addr)
	}
	config := tcpConfig()
	if len(hosts) > 1 {
		config.Control = sockets.FreeBind
	}
	var errs []error
	for _, host := range hosts {
		for _, network := range []string{"udp", "tcp"} {
			file, err := openSocket(ctx, config, network, netip.AddrPortFrom(host, port))
			if err != nil {
				errs = append(errs, err)
				continue
			}
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("opening a DNS listener on %s: %w", addr, errors.Join(errs...))
	}
	for _, err := range errs {
		if !noFamily(err) {
			log.Warn("degraded: a DNS listener cannot be opened", "error", err)
		}
	}
	return files, nil
}

// openSocket opens one socket and returns it as a file.
func openSocket(ctx context.Context, config net.ListenConfig, network string, addr netip.AddrPort) (*os.File, error) {
	var socket interface {
		File() (*os.File, error)
		Close() error
	}
	if network == "udp" {
		conn, err := config.ListenPacket(ctx, network+familyOf(addr), addr.String())
		if err != nil {
			return nil, err
		}
		socket = conn.(*net.UDPConn)
	} else {
		listener, err := config.Listen(ctx, network+familyOf(addr), addr.String())
		if err != nil {
			return nil, err
		}
		socket = listener.(*net.TCPListener)
	}
	defer func() { _ = socket.Close() }() // the file is a duplicate
	return socket.File()
}

// familyOf returns "4" or "6", as in the network names udp4 and tcp6 of package net.
func familyOf(addr netip.AddrPort) string {
	if addr.Addr().Is4() {
		return "4"
	}
	return "6"
}

// adopt returns the listeners of [Config.Sockets]. It returns an error if one of them is not on the port of
// [Config.Addr].
func (ls *listeners) adopt(port uint16) (listeners []listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range listeners {
				l.close()
			}
		}
	}()
	for _, file := range ls.config.Sockets {
		l, err := ls.adoptOne(file)
		if err != nil {
			return listeners, fmt.Errorf("inherited DNS socket %s: want a UDP or a listening TCP socket: %w", file.Name(), err)
		}
		listeners = append(listeners, l)
		if port != 0 && l.addr().port() != port {
			return listeners, fmt.Errorf("inherited DNS socket %s is on %s: want the port of %s", file.Name(), l.addr(),
				ls.config.Addr)
		}
	}
	return listeners, nil
}

// adoptOne returns the listener of one socket, and closes the file.
func (ls *listeners) adoptOne(file *os.File) (listener, error) {
	defer func() { _ = file.Close() }() // the listener has a duplicate
	if conn, err := net.FilePacketConn(file); err == nil {
		return adoptUDP(ls.handler, conn)
	}
	opened, err := net.FileListener(file)
	if err != nil {
		return nil, err
	}
	return ls.tcpListener(opened)
}
