package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
)

// notifySystemd notifies systemd, if systemd runs the agent. First it notifies systemd that the agent is ready: the
// listeners are open, and capture is on or off, as configured. It does not wait for a table, because units that need
// DNS wait for this notification at boot.
//
// Then it notifies the watchdog as long as any UDP listener answers. It also notifies the watchdog if no probe can be
// sent, because then a restart would not help.
func notifySystemd(ctx context.Context, c *core) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("reading the interval of systemd's watchdog: %w", err)
	}
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
		return nil
	}
	if c.capture != nil {
		c.capture.awaitBegun(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	if err := notify(ctx, daemon.SdNotifyReady); err != nil {
		return fmt.Errorf("notifying systemd that the agent is ready: %w", err)
	}
	steady := time.NewTimer(SteadyTime)
	defer steady.Stop()
	var tick <-chan time.Time
	if interval > 0 {
		const attempts = 3 // notifications in each interval of the watchdog
		ticker := time.NewTicker(interval / attempts)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-steady.C:
			forgetStarts(c.log)
			continue
		case <-tick:
		}
		if err := probeAny(ctx, udpListeners(c.proxy)); err != nil {
			c.log.Warn("no DNS listener answers: systemd's watchdog is not notified", "error", err)
			continue
		}
		if err := notify(ctx, daemon.SdNotifyWatchdog); err != nil {
			c.log.Warn("notifying systemd's watchdog failed", "error", err)
		}
	}
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
