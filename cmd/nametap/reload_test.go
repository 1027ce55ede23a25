package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// taken is an agent that notes what it takes.
type taken struct {
	capture agent.CaptureConfig
	dns     dnsproxy.Config
	times   int // that it took dns
	records agent.RecordsConfig
}

func (a *taken) running() configurable { return a }

func (a *taken) SetCapture(cfg agent.CaptureConfig) error {
	a.capture = cfg
	return nil
}

func (a *taken) SetRecords(cfg agent.RecordsConfig) { a.records = cfg }

func (a *taken) Configure(cfg dnsproxy.Config) error {
	a.dns = cfg
	a.times++
	return nil
}

// R10: a change that can be applied is, and one that needs a restart is logged. Each is
// logged once. What the command line gives stays as it is.
func TestReload(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nametap.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("ttl: 5s\n")
	o := parsed(t, []string{"--config", path, "--drain", "1s", "--bypass", "a,b", "--capture", "--capture-agent-gid", strconv.Itoa(os.Getgid())}, nil)
	log := new(testlog.Buffer)
	a := new(taken)
	r := newReloader(o, slog.New(slog.NewTextHandler(log, nil)), a.running)
	for _, step := range []struct {
		file  string
		lines []string // of the log
		level slog.Level
		on    bool
	}{
		{"ttl: 5s\n", nil, slog.LevelInfo, true},
		{"ttl: 6s\nlog-level: debug\ncapture-enabled: false\ncapture-exclude-uid: [7]\ncapture-servers: resolv-conf\ndrain: 3s\nbypass: [c]\n", []string{
			`level=INFO msg="setting changed" name=capture-enabled from=true to=false`,
			`level=INFO msg="setting changed" name=capture-exclude-uid from=[] to=[7]`,
			`level=INFO msg="setting changed" name=capture-servers from=all to=resolv-conf`,
			`level=INFO msg="setting changed" name=log-level from=info to=debug`,
			`level=INFO msg="setting changed" name=ttl from=5s to=6s`,
		}, slog.LevelDebug, false},
		{"ttl: 6s\nlog-level: debug\ncapture-enabled: false\ncapture-exclude-uid: [7]\ncapture-servers: resolv-conf\n", nil, slog.LevelDebug, false},
		{"dns-addr: nowhere\nttl: 6s\nlog-level: debug\ncapture-enabled: false\ncapture-exclude-uid: [7]\ncapture-servers: resolv-conf\n", []string{
			`level=WARN msg="setting changed: it takes effect after a restart" name=dns-addr from=localhost:15053 to=nowhere`,
		}, slog.LevelDebug, false},
		{"ttl: soon\n", []string{`level=ERROR msg="the settings stay unchanged"`}, slog.LevelDebug, false},
		{"ttl: soon\n", nil, slog.LevelDebug, false},
		{"capture-agent-gid: 1\ncapture-servers: other", []string{`capture-servers: \"other\": want all or resolv-conf`}, slog.LevelDebug, false},
		{"", []string{
			`level=INFO msg="setting changed" name=capture-servers from=resolv-conf to=all`,
			`level=INFO msg="setting changed" name=capture-exclude-uid from=[7] to=[]`,
			`level=INFO msg="setting changed" name=capture-enabled from=false to=true`,
			`level=INFO msg="setting changed" name=log-level from=debug to=info`,
			`level=INFO msg="setting changed" name=ttl from=6s to=30s`,
		}, slog.LevelInfo, true},
		{"ttl: 5s\negress-mark: 7\n", []string{
			`level=INFO msg="setting changed" name=ttl from=30s to=5s`,
			`level=WARN msg="setting changed: it takes effect after a restart" name=egress-mark from=0 to=7`,
		}, slog.LevelInfo, true},
		{"ttl: 5s\n", nil, slog.LevelInfo, true}, // egress-mark is as the agent runs
	} {
		write(step.file)
		said := len(log.String())
		r.reload()
		var lines []string
		for line := range strings.Lines(log.String()[said:]) {
			lines = append(lines, line)
		}
		if len(lines) != len(step.lines) {
			t.Fatalf("%q: the log has %q, want %q", step.file, lines, step.lines)
		}
		for _, want := range step.lines {
			if !strings.Contains(strings.Join(lines, ""), want) {
				t.Errorf("%q: the log has %q, want %q", step.file, lines, want)
			}
		}
		if got := o.logLevel.Level(); got != step.level {
			t.Errorf("%q: the level is %v", step.file, got)
		}
		capture := a.capture
		if capture.On != step.on || !strings.HasPrefix(capture.Because, "ISTIO_META_DNS_CAPTURE=") || capture.Config.Port != 15053 ||
			(capture.Servers == agent.AllServers) != step.on || (len(capture.Config.ExcludeUIDs) == 0) != step.on {
			t.Errorf("%q: capture is %+v", step.file, capture)
		}
	}
	for _, text := range []string{"ttl: 9s\n", "local-only: [corp.example]\n", "serve-stale: 1m\n", "upstream: [192.0.2.1]\n", "cache-size: 1MiB\n"} {
		write("")
		r.reload()
		before := a.times
		write(text)
		if r.reload(); a.times != before+1 {
			t.Errorf("DNS is configured %d times with %q", a.times-before, text)
		}
	}
	if source := settings.Source(r.last.flags.Lookup("drain")); source != "--drain" {
		t.Errorf("drain is from %s", source)
	}
}

// R10: a change that SIGHUP applied is undone when the file is changed back at once.
func TestReloadSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "nametap.yaml")
		write := func(text string) {
			t.Helper()
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("log-level: warn\n")
		o := parsed(t, []string{"--config", path}, nil)
		r := newReloader(o, slog.New(slog.DiscardHandler), new(taken).running)
		ctx, stop := context.WithCancel(t.Context())
		signals, done := make(chan os.Signal), make(chan struct{})
		go func() {
			defer close(done)
			r.run(ctx, signals)
		}()
		synctest.Wait()
		write("log-level: error\n")
		signals <- syscall.SIGHUP
		synctest.Wait()
		if level := o.logLevel.Level(); level != slog.LevelError {
			t.Errorf("after SIGHUP the level is %v", level)
		}
		write("log-level: warn\n")
		<-time.After(2 * time.Second) // of the bubble's clock
		if level := o.logLevel.Level(); level != slog.LevelWarn {
			t.Errorf("the level is %v, the file says warn", level)
		}
		stop()
		<-done
	})
}

// R10: settings from a pipe stay as they are, since it can be read only once.
func TestReloadPipe(t *testing.T) {
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if _, err := writer.WriteString("log-level: warn\n"); err != nil {
		t.Fatal(err)
	}
	writer.Close()
	o := parsed(t, []string{"--config", fmt.Sprintf("/dev/fd/%d", reader.Fd())}, nil)
	log := new(testlog.Buffer)
	r := newReloader(o, slog.New(slog.NewTextHandler(log, nil)), new(taken).running)
	for range 2 {
		r.reload()
	}
	if level := o.logLevel.Level(); level != slog.LevelWarn || log.Count("want a regular file") != 1 || log.Count("setting changed") != 0 {
		t.Errorf("the level is %v, the log has\n%s", level, log)
	}
}

// R10: a change of the node's metadata in the mesh config is logged once.
func TestReloadMetadata(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mesh")
	log := new(testlog.Buffer)
	var r *reloader
	for _, value := range []string{"a", "b", "b"} {
		text := "defaultConfig: {proxyMetadata: {ISTIO_META_NETWORK: " + value + "}}"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if r == nil {
			o := parsed(t, []string{"--mesh-config", path}, nil)
			r = newReloader(o, slog.New(slog.NewTextHandler(log, nil)), new(taken).running)
		}
		r.reload()
	}
	if n := log.Count("ISTIO_META variables changed: they take effect after a restart"); n != 1 {
		t.Errorf("the change is logged %d times:\n%s", n, log)
	}
}

// G12: a changed policy is in use; a broken or absent one changes nothing, and is logged once and a condition. A change of
// mode is a condition of an agent that does not install the rules.
func TestReloadPolicy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "guard.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("allow: [{names: [a.example]}]\n")
	o := parsed(t, []string{"--guard", path, "--xds-addr", "127.0.0.1:1", "--xds-plaintext", "--instance-ip", "192.0.2.7"}, nil)
	cfg, err := o.config()
	if err != nil || cfg.Egress == nil || cfg.Guard.Policy() == nil {
		t.Fatalf("guard %v, egress %v, error %v", cfg.Guard, cfg.Egress, err)
	}
	log := new(testlog.Buffer)
	r := newReloader(o, slog.New(slog.NewTextHandler(log, nil)), new(taken).running)
	r.showIn(&cfg)
	for _, step := range []struct {
		text, problems, name string
		lines                int
	}{
		{"allow: [{names: [a.example]}]\n", "", "a.example", 0},
		{"allow: [{names: [b.example]}]\n", "", "b.example", 1},
		{"allow: [{names: [c.example]}\n", "settings_refused", "b.example", 2},
		{"allow: [{names: [c.example]}\n", "settings_refused", "b.example", 2},
		{"", "settings_refused", "b.example", 3},
		{"mode: audit\nallow: [{names: [c.example]}]\n", "guard_pending", "c.example", 4},
		{"allow: [{names: [c.example]}]\ndirect: [10.0.0.0/8]\n", "guard_pending", "c.example", 5},
		{"allow: [{names: [c.example]}]\n", "", "c.example", 6},
	} {
		write(step.text)
		r.reload()
		var problems []string
		for _, c := range cfg.Conditions() {
			if len(c.Problems) > 0 {
				problems = append(problems, string(c.Code))
			}
		}
		if got := strings.Join(problems, " "); got != step.problems {
			t.Errorf("%q: problems %q, want %q", step.text, got, step.problems)
		}
		if got := cfg.Guard.Policy().Rules[0].Names[0]; got != step.name {
			t.Errorf("%q: the policy allows %s, want %s", step.text, got, step.name)
		}
		if n := log.Count("the policy of the guard changed") + log.Count("the settings stay unchanged"); n != step.lines {
			t.Errorf("%q: %d lines of the log, want %d:\n%s", step.text, n, step.lines, log)
		}
	}
}
