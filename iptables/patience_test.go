package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// locked makes both tools that write to a backend fail, as the legacy tools do when
// another program holds their lock for longer than they wait. They fail the first times,
// or if times is 0, as long as the file exists whose name it returns.
func (l *lab) locked(backend iptables.Backend, times int) (holding string) {
	l.t.Helper()
	dir := l.t.TempDir()
	holding = filepath.Join(dir, "holding")
	if err := os.WriteFile(holding, nil, 0o600); err != nil {
		l.t.Fatal(err)
	}
	scripts := map[string]string{}
	for _, family := range []string{"iptables", "ip6tables"} {
		name := fmt.Sprintf("%s-%s-restore", family, backend)
		scripts[name] = fmt.Sprintf(`echo x >>%[1]s/%[2]s
if [ -e %[3]s ] && { [ %[4]d = 0 ] || [ $(wc -l <%[1]s/%[2]s) -le %[4]d ]; }; then
  echo "Another app is currently holding the xtables lock. Stopped waiting after 5s." >&2; exit 4
fi
exec %[5]s "$@"
`, dir, name, holding, times, tool(l.t, name))
	}
	l.tools(scripts)
	return holding
}

// K3, K9: rules that cannot be removed because another program holds the lock are removed
// when the lock is free. Until then, nothing reports that DNS is no longer captured.
func TestRemoveWhileLocked(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		c := l.capture()
		apply(l.t, c)
		l.locked(l.backend, 2)
		remove(l.t, c)
		if got := l.holders(); got != "" {
			l.t.Errorf("rules in %s", got)
		}
		if n := l.log.Count("DNS is no longer captured"); n != 1 {
			l.t.Errorf("said %d times that DNS is no longer captured:\n%s", n, l.log)
		}
	})
}

// K4, K13: rules of nametap in the other backend that cannot be removed do not make apply
// fail. They are removed later.
func TestApplyBesideLockedBackend(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		l.apply(func(c *iptables.Config) { c.Backend = l.other() })
		holding := l.locked(l.other(), 0)
		c := l.capture(quick)
		if err := c.Apply(t.Context()); !errors.Is(err, iptables.ErrIncomplete) || !strings.Contains(err.Error(), string(l.other())) {
			t.Errorf("apply: %v", err)
		}
		l.keep(c)
		looks := c.Stats().Failures + 2
		wait.Until(t, "retries", func() bool { return c.Stats().Failures >= looks })
		if n := l.log.Count("capture rules had drifted and were repaired"); n > 0 {
			t.Errorf("logged %d times that all is repaired:\n%s", n, l.log)
		}
		if err := os.Remove(holding); err != nil {
			t.Fatal(err)
		}
		want := map[iptables.Backend]string{iptables.NFT: inNFT, iptables.Legacy: inLegacy}[l.backend]
		wait.Until(t, "the rules are in one backend", func() bool { return l.holders() == want })
		l.complete(c)
	})
}

// K4, K13: a tool that hangs does not make its backend count as unused.
func TestHangingSave(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		t := l.t
		l.sh("iptables-legacy -w 5 -t nat -A OUTPUT -d 127.0.0.11 -j ACCEPT") // as Docker does
		working := l.tools(map[string]string{
			"iptables-legacy-save":  "exec sleep 60",
			"ip6tables-legacy-save": "echo 'Permission denied' >&2; exit 1",
		})
		c := l.capture(auto, impatient)
		if err := c.Apply(t.Context()); err == nil || !strings.Contains(err.Error(), "backend legacy cannot be used") {
			t.Errorf("apply: %v", err)
		}
		working()
		if got := l.holders(); got != "" {
			t.Errorf("rules in %s", got)
		}
		apply(t, c)
		if got := l.holders(); got != inLegacy {
			t.Errorf("rules in %q, want %q", got, inLegacy)
		}
	})
}

// K9: if a tool of the other backend hangs, also for a status, no query stays captured.
func TestRemoveBesideHangingSave(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		t := l.t
		c := l.apply(impatient, func(c *iptables.Config) { c.Backend = iptables.NFT })
		l.sh("iptables-legacy -w 5 -t nat -A OUTPUT -d 127.0.0.11 -j ACCEPT")
		hung := filepath.Join(t.TempDir(), "hung")
		working := l.tools(map[string]string{"iptables-legacy-save": "echo x >" + hung + "; exec sleep 60"})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		var asking sync.WaitGroup
		asking.Go(func() { l.ns.Run(func() { _, _ = c.Status(ctx) }) }) // the output does not matter
		wait.Until(t, "the status waits", func() bool { _, err := os.Stat(hung); return err == nil })
		asking.Go(func() { l.ns.Run(func() { _ = c.Remove(ctx) }) })
		asking.Wait()
		working()
		if saves := l.saves(); strings.Contains(saves, "-j NAMETAP_OUTPUT") {
			t.Errorf("DNS is captured:\n%s", saves)
		}
	})
}
