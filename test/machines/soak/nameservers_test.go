package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/test/machines/load"
)

// recovery is how long after the return of a nameserver forwarded queries may still fail: the
// cache keeps failures for up to 5 s (F8).
const recovery = 6 * time.Second

// Nameservers are the nameservers and resolv.conf, which change at random. All queries are
// sent to A, so the agent forwards them to A if resolv.conf does not name A.
type nameservers struct {
	*world
	random *rand.Rand
	down   map[string]bool // "a", "b"
	conf   []string        // addresses in resolv.conf
	cut    time.Time       // since when no nameserver can answer; zero if one can
}

// disturbNameservers lets nameservers fail and changes resolv.conf, one after the other.
func (w *world) disturbNameservers(ctx context.Context, random *rand.Rand) {
	n := &nameservers{world: w, random: random, down: map[string]bool{}, conf: []string{a4, a6, b4}}
	for clock.Sleep(ctx, between(random, 3*time.Second, 8*time.Second)) {
		switch random.IntN(6) {
		case 0, 1:
			n.fail(ctx, "a")
		case 2:
			n.fail(ctx, "b")
		case 3:
			n.fail(ctx, "a", "b")
		default:
			if err := n.rewrite(ctx); err != nil {
				w.tb.Errorf("changing resolv.conf: %v", err)
				return
			}
		}
	}
	n.noteCut(false)
}

// servers returns the servers of a group.
func (n *nameservers) servers(group string) []*fakedns.Server {
	if group == "a" {
		return n.a
	}
	return n.b
}

// fail lets groups of nameservers fail for some seconds.
func (n *nameservers) fail(ctx context.Context, groups ...string) {
	way := []string{"refuse", "are silent", "fail"}[n.random.IntN(3)]
	d := between(n.random, time.Second, 6*time.Second)
	n.timeline.note(fmt.Sprintf("nameservers %v %s for %v, with resolv.conf %v", groups, way, d, n.conf))
	for _, group := range groups {
		n.down[group] = true
		n.noteCut(true)
		for _, server := range n.servers(group) {
			switch way {
			case "refuse":
				server.Close()
			case "are silent":
				server.Handle(records, fakedns.Drop)
			case "fail":
				server.Handle(func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(query, dns.RcodeServerFailure) })
			}
		}
	}
	clock.Sleep(ctx, d)
	for _, group := range groups {
		for _, server := range n.servers(group) {
			server.Reset()
			server.Handle(records)
			if way != "refuse" {
				continue
			}
			var err error
			n.network.Run(func() { err = server.Restart() })
			if err != nil {
				n.tb.Errorf("a nameserver does not return: %v", err)
			}
		}
		n.down[group] = false
	}
	n.noteCut(false)
	n.timeline.note(fmt.Sprintf("nameservers %v are back", groups))
}

// noteCut notes from when until when no nameserver can answer. before says that the change
// follows.
func (n *nameservers) noteCut(before bool) {
	now := time.Now()
	cut := n.down["a"] && !slices.Contains(n.conf, b4) || // also if only A can be asked
		n.down["a"] && !slices.Contains(n.conf, a4) || // A is the original destination
		n.down["a"] && n.down["b"]
	switch {
	case cut && n.cut.IsZero():
		n.cut = now
	case !cut && !before && !n.cut.IsZero():
		n.timeline.add(outage{what: "no nameserver answered", from: n.cut, until: now.Add(recovery), covers: forwardedFails})
		n.cut = time.Time{}
	}
}

// rewrite changes resolv.conf in one of the ways in which programs do.
func (n *nameservers) rewrite(ctx context.Context) error {
	confs := [][]string{{a4, a6, b4}, {b4, a4, a6}, {a4}, {b4}, {a6, b4, a4}}
	n.conf = confs[n.random.IntN(len(confs))]
	way := n.random.IntN(3)
	n.timeline.note(fmt.Sprintf("resolv.conf has %v (way %d)", n.conf, way))
	text := resolvConfText(n.conf)
	if way == 0 { // in place
		return os.WriteFile(n.resolvConf, []byte(text), 0o644) //nolint:gosec // the agent is another user
	}
	next := n.resolvConf + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil { //nolint:gosec // the agent is another user
		return err
	}
	if way == 2 { // absent for a while
		if err := os.Remove(n.resolvConf); err != nil {
			return err
		}
		began := time.Now()
		clock.Sleep(ctx, between(n.random, 0, 2*time.Second))
		defer n.noteAbsent(began)
	}
	return os.Rename(next, n.resolvConf)
}

// noteAbsent notes the end of a time without resolv.conf. An agent that starts in it has no
// search list.
func (n *nameservers) noteAbsent(began time.Time) {
	if started := n.agent.lastStart(); started.After(began.Add(-100 * time.Millisecond)) {
		n.timeline.add(outage{
			what: "the agent started without resolv.conf", from: started, until: time.Now().Add(2 * time.Second),
			covers: func(kind load.Kind, q load.Example) bool {
				return kind == load.Foreign && strings.HasSuffix(q.Name, searchDomain+".") || forwardedFails(kind, q)
			},
		})
	}
}

// resolvConfText returns a resolv.conf with nameservers.
func resolvConfText(servers []string) string {
	var b strings.Builder
	b.WriteString("search " + searchDomain + "\n")
	for _, server := range servers {
		b.WriteString("nameserver " + server + "\n")
	}
	return b.String()
}
