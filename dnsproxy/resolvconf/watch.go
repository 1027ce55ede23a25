package resolvconf

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

const (
	// settleTime is how long a file must stay the same before it is used. A file that is
	// truncated and written in place is empty for a moment, and may then end
	// in the middle of an address. A change is noticed after [clock.Tick] and settleTime at the latest. Together
	// they are 0.9 s; docs/behaviour.md (row F5) promises 1 s.
	settleTime = 100 * time.Millisecond
)

// A Watcher reports changes of a resolv.conf. It also reports changes of systemd-resolved's
// resolv.conf if that file's servers are in use.
//
// It reads the file at each tick of its clock instead of waiting for inotify events. inotify reports no
// event if another file is bind-mounted over the file, or if the file changes below an overlayfs. So the file must
// be read every second in any case. Reading finds every change: a file that is written in
// place, a file that is renamed, a symlink that is replaced. It also needs no inotify instance; by default a user
// has 128 of them, which all pods of that user on a node share. Reading costs 10 µs
// (BenchmarkRead).
type Watcher struct {
	Files
	// Clock says when to read the files. Default clock.New().
	Clock *clock.Clock
	// Current is the configuration in use when Run begins, as Read has returned it. If it is
	// nil, Run calls Changed with the first configuration.
	Current *Config
	// Changed is called for every change of the configuration, from Run's
	// goroutine. It is not called for a change of comments only. It must not be nil.
	Changed func(*Config)
	// Failed is called, from Run's goroutine, when the file becomes unusable, and again when
	// the reason changes. The previous configuration then remains in use. If Current is nil, and the file is unusable
	// when Run begins, Failed is not called for that. Failed must not be nil.
	Failed func(error)
}

// A reading is the result of reading the file once.
type reading struct {
	conf *Config
	err  error // why the file cannot be used; conf is nil then
}

// Run watches until ctx ends, and then returns nil. A file is unusable in these cases:
//   - It cannot be read.
//   - It names no nameserver, unless the configuration in use has none either.
//   - It names systemd-resolved's stub, and the servers to which the stub forwards can no longer be read although they
//     are in use.
func (w *Watcher) Run(ctx context.Context) error {
	inUse := reading{conf: w.Current}
	reported, last := inUse, w.look(inUse.conf)
	if w.Current == nil && last.err != nil {
		reported = last // the caller could not read the file either, and has reported that
	}
	ticks := w.Clock
	if ticks == nil {
		ticks = clock.New()
	}
	look := func() bool { return !reflect.DeepEqual(w.look(inUse.conf), reported) }
	for clock.Sleep(ctx, settleTime) {
		next := w.look(inUse.conf)
		if !reflect.DeepEqual(next, last) {
			last = next
			continue
		}
		switch changed := !reflect.DeepEqual(next, reported); {
		case changed && next.err != nil:
			w.Failed(next.err)
		case changed && !reflect.DeepEqual(next, inUse):
			inUse = next
			w.Changed(next.conf)
		}
		reported = next
		if !ticks.Await(ctx, clock.Tick, look) {
			return nil
		}
		last = w.look(inUse.conf)
	}
	return nil
}

// look reads the file once.
func (w *Watcher) look(inUse *Config) reading {
	conf, err := w.Read()
	switch {
	case err != nil:
		return reading{err: err}
	case len(conf.Servers) == 0 && (inUse == nil || len(inUse.Servers) > 0):
		return reading{err: errors.New("reading nameservers: the file names none")}
	case inUse != nil && inUse.Uplink != "" && conf.Uplink == "" && slices.ContainsFunc(conf.Servers, IsStub):
		return reading{err: errors.New(conf.Ignored[len(conf.Ignored)-1])}
	}
	return reading{conf: conf}
}
