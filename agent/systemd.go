package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/nametap/nametap/dnsproxy"
)

// notifySystemd tells systemd, if it started us, that the host has its DNS: the
// listeners are open, and capture is as the switch says. A table may come later, what
// waits for us at boot must not. As long as a UDP listener answers, its watchdog is told:
// the other family may be switched off, and the listeners for TCP may be full of clients,
// which is no reason to begin anew. Neither is a host that cannot take a packet more.
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
	if a.capture != nil {
		select {
		case <-a.capture.kernel.Begun():
		case <-ctx.Done():
			return nil
		}
	}
	if err := notify(ctx, daemon.SdNotifyReady); err != nil {
		return fmt.Errorf("notifying systemd that the agent is ready: %w", err)
	}
	if interval == 0 {
		return nil
	}
	const chances = 3 // to answer in time
	ticker := time.NewTicker(interval / chances)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		listeners := slices.DeleteFunc(a.proxy.Addrs(), func(l dnsproxy.Addr) bool { return l.Network != "udp" })
		if err := anyAnswers(ctx, listeners); err != nil {
			a.log.Warn("no DNS listener answers: systemd's watchdog is not notified", "error", err)
			continue
		}
		if err := notify(ctx, daemon.SdNotifyWatchdog); err != nil {
			a.log.Warn("notifying systemd's watchdog failed", "error", err)
		}
	}
}

// notify sends a state to systemd. It does not wait beyond ctx for a systemd that does not
// read it.
func notify(ctx context.Context, state string) error {
	told := make(chan error, 1)
	go func() {
		_, err := daemon.SdNotify(false, state)
		told <- err
	}()
	select {
	case err := <-told:
		return err
	case <-ctx.Done():
		return nil
	}
}
