package main

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
)

// A reloader reads the settings of a running agent again when a file has changed or a
// signal asks for it. It applies the changes that can be applied and logs all of them.
type reloader struct {
	running    *options // with the settings that the agent was started with
	last       *options // as read last
	identity   identity // as read last
	failed     string   // the last error that was logged
	log        *slog.Logger
	watcher    *settings.Watcher
	setCapture func(agent.CaptureConfig) error
	inUseNow   atomic.Pointer[map[string][]string] // what inUse returns
}

// newReloader returns a reloader for an agent that was started with these settings.
func newReloader(o *options, log *slog.Logger, setCapture func(agent.CaptureConfig) error) *reloader {
	watcher := settings.NewWatcher(settings.Files(o.flags))
	id, _ := readIdentity(o.flags, os.Environ()) // without an error, or the agent would not run
	r := &reloader{running: o, last: o, identity: id, log: log, watcher: watcher, setCapture: setCapture}
	r.noteInUse()
	return r
}

// inUse returns the settings that affect capture, as the agent uses them, unless they are the defaults. It
// is safe for concurrent use.
func (r *reloader) inUse() map[string][]string { return *r.inUseNow.Load() }

// noteInUse sets what inUse returns: what is applied while the agent runs is as read last, the rest as it
// was at the start.
func (r *reloader) noteInUse() {
	values := settings.Values(r.running.flags, func(name string) bool { return affectsCapture(name) && !applied(name) })
	maps.Copy(values, settings.Values(r.last.flags, func(name string) bool { return affectsCapture(name) && applied(name) }))
	r.inUseNow.Store(&values)
}

// run follows the files and the signals until ctx ends.
func (r *reloader) run(ctx context.Context, signals <-chan os.Signal) {
	changes := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() { r.watcher.Run(ctx, changes) })
	defer watching.Wait()
	if settings.CheckRereadable(r.running.flags) == nil {
		r.reload() // the files may have changed since the start
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changes:
		case <-signals:
			r.watcher.Note()
			r.log.Info("SIGHUP: reading the settings again")
			r.failed = "" // an answer to each signal
		}
		r.reload()
	}
}

// reload reads the settings once. If they are malformed, the agent keeps those that it has.
func (r *reloader) reload() {
	next, capture, err := r.read()
	if err != nil {
		if text := err.Error(); text != r.failed {
			r.failed = text
			r.log.Error("the settings stay unchanged: they cannot be read again", "error", err)
		}
		return
	}
	r.failed = ""
	for _, c := range changes(r.last, next) {
		switch {
		case applied(c.name):
			r.log.Info("setting changed", "name", c.name, "from", c.from, "to", c.to)
		case c.to != r.running.flags.Lookup(c.name).Value.String():
			r.log.Warn("setting changed: it takes effect after a restart", "name", c.name, "from", c.from, "to", c.to)
		}
	}
	if id, err := readIdentity(next.flags, os.Environ()); err == nil && !reflect.DeepEqual(id, r.identity) {
		r.identity = id
		r.log.Warn("ISTIO_META variables changed: they take effect after a restart")
	}
	r.last = next
	r.noteInUse()
	r.running.logLevel.Set(next.logLevel.Level())
	if err := r.setCapture(capture); err != nil {
		r.log.Error("capture stays unchanged", "error", err)
	}
}

// read reads the settings of the files, with those of the command line and the environment
// that the agent was started with, and what they say about capture.
func (r *reloader) read() (*options, agent.CaptureConfig, error) {
	next := newOptions(pflag.NewFlagSet("", pflag.ContinueOnError))
	err := cmp.Or(settings.CheckRereadable(r.running.flags), settings.CopyGiven(next.flags, r.running.flags))
	if err == nil {
		err = next.resolve()
	}
	if err != nil || !r.running.installRules {
		return next, agent.CaptureConfig{}, err
	}
	withRunning := *next // what needs a restart is as it was
	withRunning.agent = r.running.agent
	withRunning.carries, withRunning.egress = r.running.carries, r.running.egress
	withRunning.instanceIP = r.running.instanceIP
	capture, err := withRunning.agentCaptureConfig()
	return next, capture, err
}

// applied reports whether a change of a setting is applied while the agent runs: the log
// level, and which queries are captured.
func applied(name string) bool { return name == "log-level" || strings.HasPrefix(name, "capture-") }

// A settingChange is one setting that was read with another value.
type settingChange struct{ name, from, to string }

// changes returns the settings that differ, in the order of the help.
func changes(previous, next *options) []settingChange {
	var found []settingChange
	next.flags.VisitAll(func(flag *pflag.Flag) {
		from, to := previous.flags.Lookup(flag.Name).Value.String(), flag.Value.String()
		if from != to {
			found = append(found, settingChange{flag.Name, from, to})
		}
	})
	return found
}
