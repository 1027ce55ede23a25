package interop

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

var outageFor = flag.Duration("interop.outage", 10*time.Minute, "how long the API server is away in TestDiscoveryOutage")

const (
	// secondAddr is the address of a second API server, which nametap-discovery does not know.
	secondAddr = "127.0.0.1:6444"
	// catchUp is how soon after its start the objects of an API server must be served.
	catchUp = 5 * time.Second
	// alias is a Service of type ExternalName that stands for a Service of the population.
	alias = `apiVersion: v1
kind: Service
metadata: {name: alias, namespace: shop}
spec: {type: ExternalName, externalName: %s}
`
)

// D15, D16: the API server is away for ten minutes. An agent gives the right answer to each of 500
// queries a second meanwhile, and nametap-discovery stays ready and says since when and why its objects
// are old. 5 s after the API server is back, with an empty watch cache, an agent has the changes of the
// outage, deletions included, and of the time after it.
func TestDiscoveryOutage(t *testing.T) {
	c := newCluster(t)
	c.apply(objects)
	p := population{*services}
	w := c.populate(p)
	c.apply(fmt.Sprintf(alias, p.host(p.nth(false, 0))))
	d := c.discovery()
	m := c.machine(dual)
	a := m.agent(pod{"outage", p.namespace(0)}, m.discoveryFlags()...)
	wantPopulation(t, a, w.table(true))
	before, after := a.table(), a.table()
	meanwhile, afterwards := p.outageChanges(after)
	l, err := load.Start(load.Config{
		Server: netip.MustParseAddrPort(dnsAddr), Rate: rate, TCP: 0.05, Kept: 0.2, Expect: p.expectation(before, after), Enter: m.Run,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Stop()

	killed := time.Now()
	t.Run("while the API server is away", func(t *testing.T) {
		c.apiserver.end(syscall.SIGKILL)
		c.changeElsewhere(meanwhile)
		d.wantReady(killed.Add(*outageFor))
		d.wantOld(t, killed)
		if diff := before.diff(a.table()); diff != "" {
			t.Errorf("the table has changed:\n%s", diff)
		}
		wantGood(t, l)
	})
	t.Run("when it is back", func(t *testing.T) {
		expect(t, l, p.expectation(before, after), p.expectation(after, before))
		c.startAPIServer()
		ready := time.Now()
		w.change(afterwards)
		p.awaitAnswers(t, m, before, after)
		d.awaitHeard(killed.Add(*outageFor))
		took := time.Since(ready)
		t.Logf("caught up %v after the API server is ready", took.Round(time.Millisecond))
		if took > catchUp {
			t.Errorf("caught up %v after the API server is ready, want at most %v", took, catchUp)
		}
		wantGood(t, l)
		expect(t, l, p.expectation(after, before))
		asked := l.Report().Queries
		wait.Until(t, "the load has asked for all changes", func() bool { return l.Report().Queries > asked+10*rate })
		wantGood(t, l)
		if diff := after.diff(a.table()); diff != "" {
			t.Errorf("wanted (-) and the agent's (+) table:\n%s", diff)
		}
		wantPopulation(t, a, w.table(true))
		if n := d.process.logged("level=ERROR", "unable to decode"); n > 0 {
			t.Errorf("%d watches that the source has stopped are logged as failures", n)
		}
	})
}

// expect changes what the answers to a load must be.
func expect(t *testing.T, l *load.Load, expectations ...*load.Expectation) {
	t.Helper()
	if err := l.Expect(expectations...); err != nil {
		t.Fatal(err)
	}
}

// expectation returns what an agent must answer: the names of the hosts of a table, the name of an
// endpoint without a host name, and a forwarded name. The names of hosts that only another table has do
// not exist. Hosts in which the tables differ are asked for more often.
func (p population) expectation(t, other table) *load.Expectation {
	e := &load.Expectation{Questions: []load.Question{
		{Name: "192-0-2-21.manual.back.svc.cluster.local", Addresses: load.Addrs("192.0.2.21"), Weight: 100},
		{Name: "absent.example.com", Addresses: load.Addrs(upstreamAddr), Weight: 100},
	}}
	for host, entry := range t {
		for _, q := range p.questions(host, entry) {
			if other[host].String() != entry.String() {
				q.Weight = 100
			}
			e.Questions = append(e.Questions, q)
		}
	}
	for host, entry := range other {
		if _, found := t[host]; found {
			continue
		}
		for _, q := range p.questions(host, entry) {
			e.Questions = append(e.Questions, load.Question{Name: q.Name, Type: q.Type, Rcode: "NXDOMAIN", Weight: 100})
		}
	}
	return e
}

// questions returns questions for an entry, with the right answers. For SRV and PTR, only the response
// code can be checked.
func (p population) questions(host string, e entry) []load.Question {
	var four, six []netip.Addr
	for _, a := range load.Addrs(e.IPs...) {
		if a.Is4() {
			four = append(four, a)
		} else {
			six = append(six, a)
		}
	}
	all := []load.Question{{Name: host, Addresses: four}, {Name: host, Type: "AAAA", Addresses: six}}
	if !strings.HasPrefix(e.Namespace, scalePrefix) {
		return all
	}
	short := e.Shortname + "." + e.Namespace
	all = append(all, load.Question{Name: short, Addresses: four}, load.Question{Name: short + ".svc." + searchList(p.namespace(0))[0], Addresses: four})
	if !strings.Contains(e.Shortname, ".") {
		all = append(all, load.Question{Name: "_http._tcp." + host, Type: "SRV"})
		if len(four) == 1 {
			octets := strings.Split(e.IPs[0], ".")
			slices.Reverse(octets)
			all = append(all, load.Question{Name: strings.Join(octets, ".") + ".in-addr.arpa", Type: "PTR"})
		}
	}
	return all
}

// A write is a change of the population at the API server.
type write func(context.Context, *writer) error

// outageChanges returns what changes while the API server is away, and what changes afterwards. It makes
// both in the table.
func (p population) outageChanges(t table) (meanwhile, afterwards []write) {
	remove := func(i int) write {
		for host := range p.entries(i, 0) {
			delete(t, host)
		}
		return func(ctx context.Context, w *writer) error { return w.remove(ctx, p, i) }
	}
	hide := func(i int) write {
		delete(t, p.host(i))
		return func(ctx context.Context, w *writer) error { return w.put(ctx, p.service(i, hidden)) }
	}
	move := func(i int) write {
		maps.Copy(t, p.entries(i, 1))
		return func(ctx context.Context, w *writer) error { return w.putSlice(ctx, p.slice(i, 1)) }
	}
	create := func(i int) write {
		maps.Copy(t, p.entries(i, 0))
		return func(ctx context.Context, w *writer) error { return w.create(ctx, p, i) }
	}
	meanwhile = []write{remove(p.nth(false, 1)), remove(p.nth(true, 1)), hide(p.nth(false, 2)), move(p.nth(true, 2)), create(p.services)}
	afterwards = []write{remove(p.nth(false, 3)), hide(p.nth(false, 4)), move(p.nth(true, 3)), create(p.services + 1)}
	return meanwhile, afterwards
}

// change makes changes of the population.
func (w *writer) change(changes []write) {
	w.c.tb.Helper()
	for _, change := range changes {
		if err := change(w.c.tb.Context(), w); err != nil {
			w.c.tb.Fatal(err)
		}
	}
}

// changeElsewhere makes changes by way of a second API server, which it ends.
func (c *cluster) changeElsewhere(changes []write) {
	c.tb.Helper()
	second, w := c.launchAPIServer("apiserver-2", "6444"), c.writer(secondAddr)
	second.await("the second API server is ready", func() bool {
		response, err := w.client.Get("https://" + secondAddr + "/readyz")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	w.change(changes)
	second.end(syscall.SIGKILL)
}

// wantReady checks every second until a time that nametap-discovery is ready.
func (d *discovery) wantReady(until time.Time) {
	d.tb.Helper()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for now := range ticker.C {
		d.page("http://" + discoveryStatus + "/healthz/ready") // fails the test unless it is
		if now.After(until) {
			return
		}
	}
}

// wantOld checks that nametap-discovery says since when and why each resource is old.
func (d *discovery) wantOld(t *testing.T, killed time.Time) {
	t.Helper()
	for _, r := range d.resources() {
		t.Logf("%s: heard of %v ago, failing for %v: %s", r.Resource, time.Since(r.Heard).Round(time.Second), time.Since(r.FailingSince).Round(time.Second), r.Failure)
		if since := r.FailingSince.Sub(killed); r.Heard.After(killed.Add(time.Second)) || since < 0 || since > 10*time.Second || !strings.Contains(r.Failure, "connection refused") {
			t.Errorf("%+v, want a failure since %v", r, killed)
		}
	}
}

// awaitAnswers waits until an agent answers every host in which two tables differ with the
// addresses of the second table.
func (p population) awaitAnswers(t *testing.T, m *machine, before, after table) {
	t.Helper()
	conn := m.connect(dnsAddr)
	defer conn.Close()
	hosts := maps.Clone(before)
	maps.Copy(hosts, after)
	for host := range hosts {
		want := "NXDOMAIN"
		if e, found := after[host]; found {
			want = strings.Join(e.IPs, " ")
		}
		if before[host].String() != after[host].String() {
			wait.Until(t, host+" is "+want, func() bool { return conn.ask(host, "A") == want })
		}
	}
}
