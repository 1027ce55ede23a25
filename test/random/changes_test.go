package random

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// Knobs are the settings that change.
type knobs struct {
	upstream int // a group, or neverFrom for that of resolv.conf
	route    bool
	ttl      uint32
	cacheOff bool
	others   string // lines that change no answer
}

// rest is how long the config file must stay as it is to be read for sure: the 1 s of R10, and half as much again.
const rest = 1500 * time.Millisecond

// configText returns the config file of settings. random decides the order of nameservers.
func (w *world) configText(k knobs, random *rand.Rand) string {
	var servers []string
	add := func(group int, prefix string) {
		for _, s := range shuffled(random, w.judge.groups[group].servers) {
			servers = append(servers, prefix+s.Addr.String())
		}
	}
	if k.upstream >= 0 {
		add(k.upstream, "")
	}
	if k.route {
		add(routeGroup, "route.example=")
	}
	return fmt.Sprintf("upstream: [%s]\nttl: %ds\n%s", strings.Join(servers, ", "), k.ttl, k.others)
}

func shuffled[T any](random *rand.Rand, list []T) []T {
	list = slices.Clone(list)
	random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	return list
}

// resolvConfText returns a resolv.conf with nameservers.
func (w *world) resolvConfText(servers []*fakedns.Server) string {
	lines := []string{"search corp.test"}
	for _, s := range servers {
		lines = append(lines, "nameserver "+s.Addr.Addr().String())
	}
	return strings.Join(lines, "\n") + "\n"
}

// pushes pushes a table of another generation again and again.
func (w *world) pushes(ctx context.Context, random *rand.Rand) {
	for generation := 1; pause(ctx, random, 20*time.Millisecond, 500*time.Millisecond); generation++ {
		w.judge.generation.set(generation, func() { w.xds.Push(tableOf(generation)) })
	}
}

// changes changes settings and resolv.conf, flushes the cache and sends SIGHUP, again and again.
func (w *world) changes(ctx context.Context, random *rand.Rand) {
	k := atFirst
	changed, soon := time.Now(), false // when the config file was changed, and whether it had hardly rested then
	for pause(ctx, random, 20*time.Millisecond, 400*time.Millisecond) {
		rested := time.Since(changed) - w.judge.stalls.between(changed, time.Now())
		switch random.IntN(6) {
		case 0, 1:
			if soon && rested < rest {
				continue // a file that changes again and again is not read (R10)
			}
			k = w.change(k, random)
			changed, soon = time.Now(), rested < rest
		case 2:
			group := random.IntN(2)
			w.note(fmt.Sprintf("resolv.conf names group %d", group))
			text := w.resolvConfText(shuffled(random, w.judge.groups[group].servers))
			w.judge.resolvConf.set(group, func() { w.replace(w.resolvConf, text) })
		case 3:
			w.flush(random)
		case 4:
			w.note("SIGHUP")
			if err := w.agent.Signal(syscall.SIGHUP); err != nil {
				w.tb.Errorf("SIGHUP: %v", err)
			}
		case 5:
			if rested > 2*takeEffect { // the settings before are in use
				w.note("wrong settings")
				w.replace(w.config, "upstream: [nowhere]\n")
				pause(ctx, random, 100*time.Millisecond, 2*time.Second)
				w.note("right settings again")
				w.replace(w.config, w.configText(k, random))
				changed = time.Now()
			}
		}
	}
}

// change changes some of the settings.
func (w *world) change(k knobs, random *rand.Rand) knobs {
	switch random.IntN(4) {
	case 0, 1:
		k.upstream = random.IntN(3) - 1
	case 2:
		k.route = !k.route
	case 3:
		k.ttl = 5 + random.Uint32N(96) // below the cluster domain, it bounds the minimum of an SOA record, which is 4 at most
	}
	size := []string{"", "", "", "", "", "", "cache-size: 64KiB\n", "cache-size: 32MiB\n", "cache-size: 0\n"}[random.IntN(9)]
	k.cacheOff, k.others = size == "cache-size: 0\n", size
	for _, line := range []string{"upstream-order: fastest\n", "serve-stale: 0s\n", "upstream-timeout: 3900ms\n"} {
		if random.IntN(3) == 0 {
			k.others += line
		}
	}
	w.note(fmt.Sprintf("settings: %+v", k))
	w.judge.settings.set(k, func() { w.replace(w.config, w.configText(k, random)) })
	return k
}

// flush flushes all of the cache, a suffix or a name.
func (w *world) flush(random *rand.Rand) {
	var args []string
	switch random.IntN(10) { // seldom all, which would hide what stays in the cache by mistake
	case 0:
	case 1, 2:
		args = []string{"--suffix", []string{"main.example", "route.example"}[random.IntN(2)]}
	default:
		args = []string{"p" + strconv.Itoa(random.IntN(200)) + ".main.example"}
	}
	w.note(fmt.Sprintf("cache flush %v", args))
	began := time.Now()
	command := exec.Command(*program, slices.Concat([]string{"cache", "flush", "--status-addr", w.status}, args)...)
	command.Env = w.environ
	if out, err := command.CombinedOutput(); err != nil {
		w.wrong(finding{since: began, until: time.Now(), err: fmt.Errorf("%v: %w: %s", command, err, out)})
	}
}
