package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// notifySystemd tells systemd, if it started us, that the host has its DNS: the
// listeners are open, and capture is as the switch says. A table may come later, what
// waits for us at boot must not. As long as the listeners answer, its watchdog is told.
func (a *Agent) notifySystemd(ctx context.Context) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("reading what systemd's watchdog wants: %w", err)
	}
	select {
	case <-a.proxy.Ready():
	case <-ctx.Done():
		return nil
	}
	if a.rules != nil {
		select {
		case <-a.rules.begun:
		case <-ctx.Done():
			return nil
		}
	}
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		return fmt.Errorf("telling systemd that we are ready: %w", err)
	}
	if interval == 0 {
		return nil
	}
	ticker := time.NewTicker(interval / 2)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err := probe(ctx, a.proxy.Addrs()); err != nil {
			a.log.Warn("systemd's watchdog is not told that all is well", "error", err)
			continue
		}
		if _, err := daemon.SdNotify(false, daemon.SdNotifyWatchdog); err != nil {
			return fmt.Errorf("telling systemd's watchdog: %w", err)
		}
	}
}
