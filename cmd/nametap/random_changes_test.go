package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

const cacheOff = "cache-size: 0"

// setAll notes all settings, from the start.
func (w *randomWorld) setAll(k knobs, resolvConf int) {
	w.judge.resolvConf.begin(resolvConf)
	w.judge.resolvConf.end()
	w.begin(k)
	w.done()
}

// begin notes that settings are about to change, and done that they have.
func (w *randomWorld) begin(k knobs) {
	w.judge.upstream.begin(k.upstream)
	w.judge.route.begin(k.route)
	w.judge.bypass.begin(k.bypass)
	w.judge.local.begin(k.local)
	w.judge.ttl.begin(k.ttl)
	w.judge.cacheOff.begin(slices.Contains(k.others, cacheOff))
}

func (w *randomWorld) done() {
	w.judge.upstream.end()
	w.judge.route.end()
	w.judge.bypass.end()
	w.judge.local.end()
	w.judge.ttl.end()
	w.judge.cacheOff.end()
}

// resolvConfText returns a resolv.conf with nameservers, if they have port 53.
func (w *randomWorld) resolvConfText(servers []*fakedns.Server) string {
	var b strings.Builder
	b.WriteString("search corp.test\n")
	for _, s := range servers {
		if w.port53 {
			fmt.Fprintf(&b, "nameserver %s\n", s.Addr.Addr())
		}
	}
	return b.String()
}

// pushes pushes a table of another generation again and again.
func (w *randomWorld) pushes(ctx context.Context, random *rand.Rand) {
	for pause(ctx, random, 20*time.Millisecond, 500*time.Millisecond) {
		generation := w.judge.generation.last() + 1
		w.judge.generation.begin(generation)
		w.xds.Push(tableOf(generation))
		w.judge.generation.end()
	}
}

// changes changes settings and resolv.conf, flushes the cache and sends SIGHUP, again and again.
func (w *randomWorld) changes(ctx context.Context, random *rand.Rand) {
	k := knobs{upstream: groupA, ttl: 30}
	changed := time.Now() // when the config file was changed
	for pause(ctx, random, 20*time.Millisecond, 400*time.Millisecond) {
		switch random.IntN(6) {
		case 0, 1:
			k = w.change(k, random)
			changed = time.Now()
		case 2:
			group := random.IntN(2)
			w.note(fmt.Sprintf("resolv.conf names group %d", group))
			w.judge.resolvConf.begin(group)
			replaceFile(w.tb, w.resolvConf, w.resolvConfText(shuffled(random, w.judge.groups[group].servers)))
			w.judge.resolvConf.end()
		case 3:
			w.flush(random)
		case 4:
			w.note("SIGHUP")
			if err := w.process.Signal(syscall.SIGHUP); err != nil {
				w.tb.Errorf("SIGHUP: %v", err)
			}
		case 5:
			if time.Since(changed) > 2*takeEffect { // the settings before are in use
				w.note("wrong settings")
				replaceFile(w.tb, w.config, "upstream: [nowhere]\n")
				pause(ctx, random, 100*time.Millisecond, 2*time.Second)
				w.note("right settings again")
				replaceFile(w.tb, w.config, w.configText(k, random))
				changed = time.Now()
			}
		}
	}
}

// change changes some of the settings.
func (w *randomWorld) change(k knobs, random *rand.Rand) knobs {
	switch random.IntN(6) {
	case 0, 5:
		k.upstream = random.IntN(2)
		if w.port53 {
			k.upstream = random.IntN(3) - 1
		}
	case 1:
		k.route = !k.route
	case 2:
		k.bypass = !k.bypass
	case 3:
		k.local = !k.local
	case 4:
		k.ttl = 1 + random.Uint32N(100)
	}
	k.others = nil
	for _, lines := range [][]string{
		{cacheOff, "cache-size: 64KiB", "cache-size: 32MiB"},
		{"upstream-order: fastest"},
		{"serve-stale: 0s"},
		{"upstream-timeout: 3900ms"},
	} {
		if random.IntN(3) == 0 {
			k.others = append(k.others, lines[random.IntN(len(lines))])
		}
	}
	w.note(fmt.Sprintf("settings: %+v", k))
	w.begin(k)
	replaceFile(w.tb, w.config, w.configText(k, random))
	w.done()
	return k
}

// flush flushes all of the cache, a suffix or a name.
func (w *randomWorld) flush(random *rand.Rand) {
	var args []string
	switch random.IntN(10) { // seldom all, which would hide what stays in the cache by mistake
	case 0:
	case 1, 2:
		args = []string{"--suffix", []string{"loc.example", "main.example", "route.example"}[random.IntN(3)]}
	default:
		args = []string{"p" + strconv.Itoa(random.IntN(200)) + ".main.example"}
	}
	w.note(fmt.Sprintf("cache flush %v", args))
	w.command(append([]string{"cache", "flush"}, args...)...)
}
