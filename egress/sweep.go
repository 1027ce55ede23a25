package egress

import (
	"context"
	"errors"
	"sort"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// sweepInterval is how often all connections are looked at.
	sweepInterval = 5 * time.Second
	// halfClosedShare and newShare divide the idle timeout: of a connection that has ended in one direction, and of
	// one that is closed to let another one in. With one hour, these are five minutes and one.
	halfClosedShare = 12
	newShare        = 60
)

// errReset is the error of a connection that its peer has reset, if no read or write has returned it.
var errReset = errors.New("the peer reset the connection")

// sweep ends connections that are idle, and those whose peer has reset them while the other one takes nothing, until ctx
// ends. The kernel knows when data was last sent and received, so copying keeps no time.
func (s *Server) sweep(ctx context.Context) {
	interval := min(sweepInterval, max(s.config.IdleTimeout/newShare, time.Millisecond))
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var idle []idlePair
		for _, p := range s.pairs() {
			if !p.half && (p.up.ended.Load() || p.down.ended.Load()) {
				p.keepHalf()
			}
			switch since := p.idle(); {
			case p.vanished():
				p.abort()
			case since >= s.config.IdleTimeout, p.half && since >= s.config.IdleTimeout/halfClosedShare:
				s.metrics.idle.Inc()
				p.abort()
			case since >= s.config.IdleTimeout/newShare:
				idle = append(idle, idlePair{p, since})
			}
		}
		sort.Slice(idle, func(i, j int) bool { return idle[i].since < idle[j].since })
		s.mu.Lock()
		s.longIdle = idle
		s.mu.Unlock()
	}
}

// keepHalf probes the connections more often, because data has ended in one direction. Connection tracking
// forgets such a connection after 60 s without a packet (nf_conntrack_tcp_timeout_close_wait). The rules then
// no longer translate its addresses, so what the host sends does not reach the client.
func (p *pair) keepHalf() {
	p.half = true
	often := keepAlive()
	often.Idle = often.Interval
	_, _ = p.client.SetKeepAliveConfig(often), p.host.SetKeepAliveConfig(often) // one that has failed needs none
}

// An idlePair is a pair that was idle in the last sweep, and for how long.
type idlePair struct {
	*pair

	since time.Duration
}

// makeRoom closes the connection that has been idle longest. It reports false if there is none.
func (s *Server) makeRoom() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.longIdle) > 0 {
		p := s.longIdle[len(s.longIdle)-1]
		s.longIdle = s.longIdle[:len(s.longIdle)-1]
		if p.running.Load() > 0 && p.idle() >= p.since { // it has sent nothing since the sweep
			s.metrics.idle.Inc()
			p.abort()
			return true
		}
	}
	return false
}

// idle returns for how long no data was sent or received.
func (p *pair) idle() time.Duration {
	client, host := info(p.up.fromRaw), info(p.down.fromRaw)
	last := min(client.Last_data_recv, client.Last_data_sent, host.Last_data_recv, host.Last_data_sent)
	return time.Duration(last) * time.Millisecond
}

// vanished reports whether a peer has reset its connection. What a host sent before its reset is still passed on.
func (p *pair) vanished() bool {
	client, host := info(p.up.fromRaw).State == unix.BPF_TCP_CLOSE, info(p.down.fromRaw).State == unix.BPF_TCP_CLOSE
	// After the end of both directions, a connection has the same state.
	return client && !p.down.ended.Load() || host && !p.up.ended.Load() && p.down.ended.Load()
}

// info returns what the kernel knows of a connection; the zero value if this process has closed it.
func info(conn syscall.RawConn) (info unix.TCPInfo) {
	_ = conn.Control(func(fd uintptr) {
		if found, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO); err == nil { //nolint:gosec // a descriptor
			info = *found
		}
	})
	return info
}

// failure returns the error of a connection that was reset. A connection that has ended in both directions looks the same.
func failure(conn syscall.RawConn) error {
	code := 0
	err := conn.Control(func(fd uintptr) {
		code, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) //nolint:gosec // a descriptor
	})
	switch {
	case err != nil:
		return err
	case code != 0:
		return unix.Errno(code)
	case info(conn).State == unix.BPF_TCP_CLOSE:
		return errReset
	}
	return nil
}
