package resolvconf

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

const (
	// settleTime is how long a file must stay the same before it is used. A file that is
	// truncated and written in place is empty for a moment, and may then end
	// in the middle of an address. settleTime and [clock.Tick] bound how late a change is
	// noticed: 0.9 s, less than the 1 s of F5.
	settleTime = 100 * time.Millisecond
)

// A Watcher reports changes of a resolv.conf. It also reports changes of systemd-resolved's
// resolv.conf if that file's servers are in use.
//
// It reads the file at each tick of its clock instead of waiting for inotify events. There are no
// events for a file that is bind-mounted over, or that changes below an overlayfs, so the file must
// be read every second in any case. Reading works however the file is changed (written in
// place, renamed, a symlink replaced at any depth). It needs no inotify instance: by default a user
// has 128, which all pods of that user on a node share. It costs 10 µs (BenchmarkRead), or less while
// the times of the files are unchanged.
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
	// the reason changes; the previous configuration remains valid. It is not called for a file
	// that was unusable when Run began, if Current is nil. It must not be nil.
	Failed func(error)
}

// An identity differs if the content of the files differs. It is made without reading them.
type identity struct {
	path, uplink fileIdentity
	settled      bool // a later change gives another identity
}

// A fileIdentity is the inode of a file and the time of its last change; zero if the file is missing.
type fileIdentity struct {
	dev, inode uint64
	size       int64
	changed    syscall.Timespec
}

// changeTime is more than the precision of a file's time of change: a change that much later has another time.
const changeTime = 2 * time.Second

// identify returns the identity of the files.
func (w *Watcher) identify() identity {
	id := identity{settled: true}
	now := time.Now()
	for path, file := range map[string]*fileIdentity{cmp.Or(w.Path, DefaultPath): &id.path,
		cmp.Or(w.Uplink, defaultUplink): &id.uplink} {
		var stat syscall.Stat_t
		if syscall.Stat(path, &stat) != nil {
			continue
		}
		*file = fileIdentity{dev: stat.Dev, inode: stat.Ino, size: stat.Size, changed: stat.Ctim}
		id.settled = id.settled && now.Sub(time.Unix(stat.Ctim.Unix())) > changeTime
	}
	return id
}

// A reading is the result of reading the file once.
type reading struct {
	conf *Config
	err  error // why the file cannot be used; conf is nil then
}

// Run watches until ctx ends, and then returns nil. A file is unusable if it cannot be read; if it names no nameserver,
// except while a configuration without nameservers is in use; or if it names systemd-resolved's stub, and the servers
// behind the stub were in use before and can no longer be read.
func (w *Watcher) Run(ctx context.Context) error {
	inUse := reading{conf: w.Current}
	reported := inUse
	last := w.look(inUse.conf)
	if w.Current == nil && last.err != nil {
		reported = last // the caller could not read the file either, and has reported that
	}
	ticks := w.Clock
	if ticks == nil {
		ticks = clock.New()
	}
	var seen identity // identity of the files at the latest reading that was equal to last; zero if there is none
	var current identity
	look := func() bool {
		current = w.identify()
		return !current.settled || current != seen
	}
	for settled := false; ; {
		if !settled && !clock.Sleep(ctx, settleTime) || settled && !ticks.Await(ctx, clock.Tick, look) {
			return nil
		}
		if !settled {
			current = w.identify()
		}
		now := w.look(inUse.conf)
		if settled = reflect.DeepEqual(now, last); !settled {
			last, seen = now, identity{}
			continue
		}
		seen = current
		if reflect.DeepEqual(now, reported) {
			continue
		}
		reported = now
		switch {
		case now.err != nil:
			w.Failed(now.err)
		case !reflect.DeepEqual(now, inUse):
			inUse = now
			w.Changed(now.conf)
		}
	}
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
