package soak

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// repairTime is how long queries may reach nameservers after the rules were flushed, or after
// the agent is back if it was away then: until the next check, until the one after it, which
// drops conntrack entries of replies that were in flight, and the time of the tools on a busy
// machine.
const repairTime = 2*reconcile + 3*time.Second

// rulesFlushed is the name of the outage of queries that were not captured.
const rulesFlushed = "rules were flushed"

// A flush is a command that removes rules.
type flush struct {
	input string // standard input
	args  []string
}

// flushes are the ways in which other programs remove rules.
func flushes() []flush {
	empty := "*nat\n:PREROUTING ACCEPT\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n"
	var list []flush
	for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
		list = append(list,
			flush{args: []string{tool, "-w", "-t", "nat", "-F"}},
			flush{args: []string{tool, "-w", "-t", "nat", "-F", "OUTPUT"}},
			flush{args: []string{tool, "-w", "-t", "raw", "-F"}},
			flush{input: empty, args: []string{tool + "-restore", "-w"}},
		)
	}
	list[3].args[0], list[7].args[0] = "iptables-nft-restore", "ip6tables-nft-restore"
	return append(list, flush{args: []string{"nft", "flush", "ruleset"}}, flush{args: []string{"nft", "flush", "ruleset"}})
}

// disturbRules flushes rules at random times.
func (w *world) disturbRules(ctx context.Context, random *rand.Rand) {
	list := flushes()
	for clock.Sleep(ctx, between(random, 8*time.Second, 20*time.Second)) {
		f := list[random.IntN(len(list))]
		what := strings.Join(f.args, " ")
		w.timeline.note(what)
		began := time.Now()
		if err := w.exec(ctx, f.input, f.args[0], f.args[1:]...); err != nil {
			w.tb.Errorf("flushing rules: %v", err)
			return
		}
		w.timeline.add(outage{what: rulesFlushed, from: began.Add(-50 * time.Millisecond), until: time.Now().Add(repairTime), covers: escaped})
	}
}
