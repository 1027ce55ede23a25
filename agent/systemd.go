package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/clock"
)

// notifySystemd notifies systemd, if systemd runs the agent. First it notifies systemd that the agent is ready: the
// listeners are open, and capture is on or off, as configured. It does not wait for a table, because units that need
// DNS wait for this notification at boot.
func notifySystemd(ctx context.Context, c *core) error {
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
		return nil
	}
	if c.capture != nil {
		c.capture.awaitBegun(ctx)
	}
	if ctx.Err() == nil {
		if err := notify(ctx, daemon.SdNotifyReady); err != nil {
			return fmt.Errorf("notifying systemd that the agent is ready: %w", err)
		}
		c.notified.Store(true)
	}
	if clock.Sleep(ctx, SteadyTime) {
		forgetStarts(c.log)
	}
	return nil
}

// watchListeners probes the UDP listeners until ctx ends: even after a signal to end, because the agent should answer
// until it closes its sockets. While they answer, it notifies the supervisor and systemd's watchdog. While one of them
// is silent, it probes the TCP listeners, too. It waits for no disk, unlike polls of the agent's clock.
func watchListeners(ctx context.Context, c *core) error {
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("reading the interval of systemd's watchdog: %w", err)
	}
	interval := 4 * time.Second
	if watchdog > 0 {
		interval = min(interval, watchdog/3)
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for answered := map[string]bool{}; ; {
		listeners := udpListeners(c.proxy)
		if len(*c.silent.Load()) > 0 {
			listeners = c.proxy.Addrs()
		}
		found := probe.Listeners(ctx, listeners...)
		if ctx.Err() != nil {
			return nil
		}
		texts := probe.Errors(found)
		c.silent.Store(&texts)
		if hangs(answered, found) {
			c.log.Warn("DNS listeners do not answer: the agent is restarted unless they do")
		} else if err := c.saysAnswers(ctx, watchdog > 0 && c.notified.Load()); err != nil {
			c.log.Warn("saying that the agent answers has failed", "error", err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// saysAnswers notifies the supervisor, and systemd if it has a watchdog.
func (c *core) saysAnswers(ctx context.Context, watchdog bool) (err error) {
	if c.config.Heart != nil {
		_, err = c.config.Heart.Write([]byte{0})
	}
	if watchdog {
		err = errors.Join(err, notify(ctx, daemon.SdNotifyWatchdog))
	}
	return err
}

// hangs reports whether UDP listeners are silent: one that has answered before, or all. One of two families may never work
// on this host. If no probe could be sent, a restart would not help. hangs adds the listeners that answer to answered.
func hangs(answered map[string]bool, found []probe.Result) bool {
	works, silent, stopped := false, false, false
	for _, p := range found {
		switch {
		case p.Network != "udp":
		case p.Answered():
			works, answered[p.To] = true, true
		case p.Sent():
			silent, stopped = true, stopped || answered[p.To]
		}
	}
	return stopped || silent && !works
}

// notify sends state to systemd, if systemd runs the agent. While the socket of systemd is full, notify retries. It
// returns nil if ctx ends first.
func notify(ctx context.Context, state string) error {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return nil
	}
	const pause = 20 * time.Millisecond
	for {
		err := notifyWith(state, nil)
		switch {
		case !errors.Is(err, unix.EAGAIN):
			return err
		case !clock.Sleep(ctx, pause):
			return nil
		}
	}
}
