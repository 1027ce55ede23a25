package agent

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/listen"
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
		if err := listen.Notify(ctx, daemon.SdNotifyReady, nil); err != nil {
			return err
		}
		c.notified.Store(true)
	}
	if clock.Sleep(ctx, steadyTime) {
		forgetStarts(c.log)
	}
	return nil
}

// watchListeners probes the UDP listeners until ctx ends: even after a signal to end, because the agent should answer
// until it closes its sockets. While they answer, it notifies systemd's watchdog. While one of them is silent, it probes
// the TCP listeners, too. It waits for no disk, unlike polls of the agent's clock. If the listeners hang twice in
// succession, an agent that a supervisor restarts ends itself, and prints its stacks.
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
	hung := false
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
		switch hangs := hangs(answered, found); {
		case hangs && hung && c.config.Supervised:
			_ = unix.Kill(os.Getpid(), unix.SIGQUIT) // never fails
		case hangs:
			hung = true
			c.log.Error("the agent hangs: DNS listeners do not answer; it is restarted unless they do", "error", strings.Join(texts, "; "))
		default:
			hung = false
			if watchdog == 0 || !c.notified.Load() {
				break
			}
			if err := listen.Notify(ctx, daemon.SdNotifyWatchdog, nil); err != nil {
				c.log.Warn("the watchdog does not know that the agent answers", "error", err)
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
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
