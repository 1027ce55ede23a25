package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"

	"github.com/miekg/dns"
)

const (
	// replayRate is in queries per second, slow enough for TTLs to expire during the run.
	replayRate = 2500
	// replayEDNS is the UDP size in the clients' OPT records.
	replayEDNS = 1232
	// shownDifferences is the number of differences in the report.
	shownDifferences = 10
)

// replays sends the same questions to the agent and to its nameserver, and compares the
// replies.
func (e *experiments) replays(ctx context.Context) error {
	z := lab.MakeZone()
	if err := e.startResolver(ctx, z); err != nil {
		return err
	}
	if err := e.lab.UseNameservers(lab.FirstServer()); err != nil {
		return err
	}
	p := lab.Forwarders()[0]
	addr, err := lab.FreeAddr(ctx)
	if err != nil {
		return err
	}
	how, err := p.Prepare(ctx, e.lab, addr)
	if err != nil {
		return err
	}
	agent, err := e.lab.Start(ctx, lab.Command{Name: p.Name, Argv: how.Argv})
	if err != nil {
		return err
	}
	defer e.lab.Stop(agent)
	if err := agent.Await(ctx, lab.StartLimit, how.Ready); err != nil {
		return err
	}
	before, err := metrics(ctx, how.Status)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.progress, "replaying %s queries, %s a second\n", report.Thousands(e.queries), report.Thousands(replayRate))
	r := replayAll(ctx, addr, z.Replayed(e.queries))
	if err := ctx.Err(); err != nil {
		return err
	}
	after, err := metrics(ctx, how.Status)
	if err != nil {
		return err
	}
	for _, d := range r.differences[:min(len(r.differences), shownDifferences)] {
		e.results.note("%s", d)
	}
	const asked, forwarded = "istio_agent_dns_requests_total", "istio_agent_dns_upstream_requests_total"
	hits := 1 - (after[forwarded]-before[forwarded])/(after[asked]-before[asked])
	e.results.Tables = append(e.results.Tables, r.table(hits))
	return agent.Alive()
}

// startResolver starts unbound as the nameserver, which forwards to an NSD with the zone.
func (e *experiments) startResolver(ctx context.Context, z *lab.Zone) error {
	behind := lab.Port53(lab.Address(127, 4))
	how, err := e.lab.NSD(ctx, behind, strings.TrimSuffix(lab.ReplayDomain, "."), []byte(z.Text.String()))
	if err != nil {
		return err
	}
	authority, err := e.lab.Start(ctx, lab.Command{Name: "nsd", Argv: how.Argv})
	if err != nil {
		return err
	}
	existing := "ns." + lab.ReplayDomain
	err = authority.Await(ctx, lab.StartLimit, func(ctx context.Context) error { return lab.Resolves(ctx, behind, existing) })
	if err != nil {
		return err
	}
	binary, err := lab.FindTool("unbound", "unbound")
	if err != nil {
		return err
	}
	// The list of modules leaves out DNSSEC, because the zone is not signed. Responses are minimal, because answers
	// must not depend on other entries of the cache.
	path, err := e.lab.UnboundConfig(lab.Port53(lab.FirstServer()), fmt.Sprintf(`  module-config: "iterator"
  do-not-query-localhost: no
  local-zone: "example." nodefault
  minimal-responses: yes
stub-zone:
  name: %q
  stub-addr: %s
`, lab.ReplayDomain, behind.Addr()))
	if err != nil {
		return err
	}
	resolver, err := e.lab.Start(ctx, lab.Command{Name: "unbound", Argv: []string{binary, "-d", "-c", path}})
	if err != nil {
		return err
	}
	return resolver.Await(ctx, lab.StartLimit, func(ctx context.Context) error {
		return lab.Resolves(ctx, lab.Port53(lab.FirstServer()), existing)
	})
}

// A replay is the result of all questions.
type replay struct {
	asked, unanswered, newer int
	differences              []string
}

// replayAll sends every question to the agent at addr, and then to its nameserver.
func replayAll(ctx context.Context, addr netip.AddrPort, questions []dns.Question) *replay {
	r := &replay{asked: len(questions)}
	var mu sync.Mutex
	var asking sync.WaitGroup
	ticker := time.NewTicker(time.Second / replayRate)
	defer ticker.Stop()
	for _, q := range questions {
		asking.Go(func() {
			err := compareReplies(ctx, addr, q)
			mu.Lock()
			defer mu.Unlock()
			r.add(q, err)
		})
		select {
		case <-ticker.C:
		case <-ctx.Done():
			asking.Wait()
			return r
		}
	}
	asking.Wait()
	return r
}

// Kinds of differences.
var (
	errUnanswered = errors.New("no answer")
	errNewer      = errors.New("TTL above the nameserver's")
)

// add counts the result of a comparison.
func (r *replay) add(q dns.Question, err error) {
	switch {
	case err == nil:
		return
	case errors.Is(err, errUnanswered):
		r.unanswered++
	case errors.Is(err, errNewer):
		r.newer++
	}
	r.differences = append(r.differences, fmt.Sprintf("%s %s: %v", q.Name, dns.TypeToString[q.Qtype], err))
}

// compareReplies queries the agent, then its nameserver. In this order, a TTL of the
// nameserver is never below the agent's if the agent counts TTLs down.
func compareReplies(ctx context.Context, addr netip.AddrPort, q dns.Question) error {
	query := func() *dns.Msg {
		m := new(dns.Msg).SetQuestion(q.Name, q.Qtype)
		return m.SetEdns0(replayEDNS, false)
	}
	ours := lab.Ask(ctx, addr, query(), lab.Patience)
	if ours.Err != nil {
		return fmt.Errorf("%w from the agent: %w", errUnanswered, ours.Err)
	}
	theirs := lab.Ask(ctx, lab.Port53(lab.FirstServer()), query(), lab.Patience)
	if theirs.Err != nil {
		return fmt.Errorf("%w from the nameserver: %w", errUnanswered, theirs.Err)
	}
	return difference(ours.Reply, theirs.Reply)
}

// difference compares two replies, except for ID, order and compression. The TTLs in ours, the agent's reply, may be
// lower than in theirs. By rounding, they may also be a second higher.
func difference(ours, theirs *dns.Msg) error {
	a, b := ours.MsgHdr, theirs.MsgHdr
	a.Id, b.Id = 0, 0
	if a != b {
		return fmt.Errorf("header %v, want %v", a, b)
	}
	if !slices.Equal(ours.Question, theirs.Question) {
		return fmt.Errorf("question %v, want %v", ours.Question, theirs.Question)
	}
	for _, section := range []struct {
		name         string
		ours, theirs []dns.RR
	}{
		{"answer", ours.Answer, theirs.Answer},
		{"authority", ours.Ns, theirs.Ns},
		{"additional", ours.Extra, theirs.Extra},
	} {
		if err := recordDifference(section.ours, section.theirs); err != nil {
			return fmt.Errorf("%s section: %w", section.name, err)
		}
	}
	return nil
}

// recordDifference compares the records of a section, except OPT, which is hop by hop.
func recordDifference(ours, theirs []dns.RR) error {
	a, b := ttls(ours), ttls(theirs)
	for record := range b {
		if _, ok := a[record]; !ok {
			return fmt.Errorf("lacks %q", record)
		}
	}
	for record, ttl := range a {
		limit, ok := b[record]
		if !ok {
			return fmt.Errorf("has %q, which the nameserver does not", record)
		}
		if ttl > limit+1 {
			return fmt.Errorf("%w: %d, want at most %d, for %q", errNewer, ttl, limit, record)
		}
	}
	if count(ours) != count(theirs) {
		return fmt.Errorf("%d records, want %d", count(ours), count(theirs))
	}
	return nil
}

// ttls returns the TTLs of records by their presentation format without the TTL.
func ttls(records []dns.RR) map[string]uint32 {
	all := map[string]uint32{}
	for _, rr := range records {
		if rr.Header().Rrtype == dns.TypeOPT {
			continue
		}
		bare := dns.Copy(rr)
		bare.Header().Ttl = 0
		all[bare.String()] = rr.Header().Ttl
	}
	return all
}

// count counts the records, except OPT.
func count(records []dns.RR) int {
	n := 0
	for _, rr := range records {
		if rr.Header().Rrtype != dns.TypeOPT {
			n++
		}
	}
	return n
}

// table returns the result, with the share of queries that were not forwarded.
func (r *replay) table(hits float64) report.Table {
	return report.Table{
		Title:  report.Thousands(r.asked) + " queries to the agent, each repeated to its nameserver",
		Header: []string{"differences", "count"},
		Rows: [][]string{
			{"all", strconv.Itoa(len(r.differences))},
			{"of these, no answer", strconv.Itoa(r.unanswered)},
			{"of these, a TTL above the nameserver's", strconv.Itoa(r.newer)},
			{"queries that were not forwarded, %", report.Cell(100 * hits)},
		},
	}
}
