package test

import (
	"fmt"
	"os"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestEndSignals checks for every way to end an agent that its rules are removed when it
// has ended.
func TestEndSignals(t *testing.T) { // R8, K9
	t.Parallel()
	for name, signals := range map[string][]os.Signal{
		"hang-up":         {syscall.SIGHUP},
		"interrupt":       {os.Interrupt},
		"pipe":            {syscall.SIGPIPE, syscall.SIGTERM},
		"again and again": {syscall.SIGTERM, syscall.SIGHUP, os.Interrupt, syscall.SIGTERM},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			v.terminal = slices.Contains(signals, os.Signal(syscall.SIGHUP))
			drain := "10ms"
			if len(signals) > 1 && name != "pipe" {
				drain = "1h"
			}
			a := v.capture("--drain", drain)
			v.asked(named, meshIP)
			for i, signal := range signals {
				_ = a.Process.Signal(signal) // it may have ended
				if i == 0 && name != "pipe" {
					wait.Until(t, "the agent drains", func() bool { return a.log.Count("draining") > 0 })
				}
			}
			wait.For(t, "the agent ends", a.ended)
			if code := a.ProcessState.ExitCode(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if v.captured() {
				t.Errorf("rules are left:\n%s", v.Rules())
			}
			v.asked(named, namedIP)
		})
	}
}

// TestHangupReloads checks that SIGHUP makes the agent read its settings again without a
// terminal, also with --supervise, and under systemd. It changes nothing else.
func TestHangupReloads(t *testing.T) { // R8, R10
	t.Parallel()
	for name, flags := range map[string][]string{"alone": nil, "supervised": {"--supervise"}, "systemd": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			if name == "systemd" {
				v.terminal = true
				v.notifications()
			}
			config := v.write("nametap.yaml", "drain: 10ms\n")
			a := v.capture(append(flags, "--config", config)...)
			for n := 1; n <= 2; n++ {
				if err := a.Process.Signal(syscall.SIGHUP); err != nil {
					t.Fatal(err)
				}
				wait.Until(t, "the agent reads its settings again", func() bool { return a.log.Count("reading the settings again") == n })
			}
			v.asked(named, meshIP)
			v.write("nametap.yaml", "drain: 20ms\ncapture-enabled: false\nlog-level: warn\n")
			wait.Until(t, "the switch is followed", func() bool { return !v.captured() })
			for _, said := range []string{"name=capture-enabled from=true to=false", "name=log-level from=info to=warn"} {
				if a.log.Count(said) != 1 {
					t.Errorf("want %q:\n%s", said, a.log)
				}
			}
			a.end(os.Interrupt)
			if code := a.ProcessState.ExitCode(); code != 0 || a.log.Count("msg=ended") != 0 {
				t.Errorf("exit code %d:\n%s", code, a.log)
			}
		})
	}
}

// TestReloadCapture checks that changes of what is captured take effect while the agent runs:
// excluded destinations, and the nameservers of resolv.conf only.
func TestReloadCapture(t *testing.T) { // K6, R10
	t.Parallel()
	v := newVM(t, "nft")
	config := v.write("nametap.yaml", "")
	a := v.capture("--config", config)
	v.asked(named, meshIP)
	v.asked(other, meshIP)
	for _, step := range []struct{ config, log, named, other string }{
		{"capture-exclude-cidr: " + named + "\n", "name=capture-exclude-cidr", namedIP, meshIP},
		{"capture-servers: resolv-conf\n", "from=all to=resolv-conf", meshIP, otherIP},
		// The agent does not listen on the address of that interface.
		{"capture-exclude-cidr: " + named + "\ncapture-virtual-interface: eth7\n", "the settings stay unchanged", meshIP, otherIP},
		{"", "from=resolv-conf to=all", meshIP, meshIP},
	} {
		v.replace("nametap.yaml", step.config)
		wait.Until(t, "the log has the change", func() bool { return a.log.Count(step.log) > 0 })
		wait.Until(t, "the settings are in effect", func() bool {
			return v.digSoon("@"+named, mesh) == step.named && v.digSoon("@"+other, mesh) == step.other
		})
		v.asked(named, step.named)
		v.asked(other, step.other)
	}
	if n := a.log.Count("the settings stay unchanged"); n != 1 {
		t.Errorf("malformed settings are logged %d times:\n%s", n, a.log)
	}
}

// openTerminal returns a pseudo-terminal, which is closed at the end of the test.
func openTerminal(tb testing.TB) *os.File {
	tb.Helper()
	control, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	number, err := unix.IoctlGetUint32(int(control.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(control.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		tb.Fatal(err)
	}
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { control.Close(); terminal.Close() })
	return terminal
}
