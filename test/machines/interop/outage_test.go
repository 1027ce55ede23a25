package interop

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

// rate is the number of queries a second of a load.
const rate = 500

// load starts a load of queries for every host of the agent's table and for a forwarded name.
func (a *agent) load() *load.Load {
	a.tb.Helper()
	e := &load.Expectation{Questions: []load.Question{{Name: "absent.example.com", Addresses: load.Addrs(upstreamAddr)}}}
	for host, entry := range a.table() {
		var four []netip.Addr
		for _, ip := range load.Addrs(entry.IPs...) {
			if ip.Is4() {
				four = append(four, ip)
			}
		}
		e.Questions = append(e.Questions, load.Question{Name: host, Addresses: four, Weight: 2})
	}
	l, err := load.Start(load.Config{
		Server: netip.MustParseAddrPort(dnsAddr), Rate: rate, TCP: 0.05, Kept: 0.2, Expect: e, Enter: a.m.Run,
	})
	if err != nil {
		a.tb.Fatal(err)
	}
	return l
}

// busyLag is the lag of a load that did not get the processor. Its queries time out, too.
const busyLag = time.Second

// wantGood reports the load since the last report, and fails if an answer was wrong or none
// came. On a machine that was busy with other work, one query in a thousand may be lost.
func wantGood(t *testing.T, l *load.Load) {
	t.Helper()
	r := l.Cut()
	t.Log(r)
	bad := r.Bad()
	if lost := r.Count(load.Lost); r.Lag > busyLag && lost*1000 < r.Queries {
		t.Logf("the machine is busy: %d queries are lost, and the load lagged by %v", lost, r.Lag)
		bad -= lost
	}
	if bad > 0 || r.Count(load.Right) == 0 {
		t.Errorf("%d of %d queries have no right answer", bad, r.Queries)
	}
}

// entryOf returns a ServiceEntry of a host in the namespace shop.
func entryOf(host, address string) string {
	return fmt.Sprintf("apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: new, namespace: shop}\n"+
		"spec: {hosts: [%s], addresses: [%s], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}\n", host, address)
}

// C5: while istiod restarts, crashes, is absent or has no API server, the agent answers every
// query from its table. Afterwards its table is istiod's again, and changes arrive.
func TestOutages(t *testing.T) {
	d := start(t, options{})
	m := d.machine(onlyIPv4)
	a := m.agent(pod{"outage", "shop"}, m.plain(d)...)
	d.wantTable(a)
	l := a.load()
	defer l.Stop()
	changed := 0
	// wantChange checks that the agent follows istiod.
	wantChange := func(t *testing.T) {
		t.Helper()
		d.wantTable(a)
		changed++
		host, address := fmt.Sprintf("outage-%d.example.com", changed), fmt.Sprintf("198.51.100.%d", 210+changed)
		d.apply(entryOf(host, address))
		wait.Until(t, "a change is seen", func() bool { return m.ask(dnsAddr, host, "A") == address })
	}
	for _, tc := range []struct {
		name   string
		outage func()
	}{
		{"istiod restarts", func() { d.process.end(syscall.SIGTERM); d.start() }},
		{"istiod is killed", func() { d.process.end(syscall.SIGKILL); d.start() }},
		{"istiod is absent for 20 s", func() {
			d.process.end(syscall.SIGKILL)
			time.Sleep(20 * time.Second) //nolint:forbidigo // the outage, during which the load checks all answers
			d.start()
		}},
		{"istiod hangs for 40 s", func() {
			d.process.signal(syscall.SIGSTOP)
			time.Sleep(40 * time.Second) //nolint:forbidigo // the outage, during which the load checks all answers
			d.process.signal(syscall.SIGCONT)
		}},
		{"the API server is killed", func() { d.apiserver.end(syscall.SIGKILL); d.startAPIServer() }},
		{"istiod starts without the API server", func() {
			d.apiserver.end(syscall.SIGKILL)
			d.process.end(syscall.SIGKILL)
			d.launch()
			time.Sleep(5 * time.Second) //nolint:forbidigo // istiod is not ready for that long
			d.startAPIServer()
			d.awaitReady()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			begun := time.Now()
			tc.outage()
			wantChange(t)
			t.Logf("over after %v", time.Since(begun).Round(100*time.Millisecond))
			wantGood(t, l)
		})
	}
}

// C5, C10: istiod ends every connection after 15 s. For three minutes no query is lost, none has
// a wrong answer, no warning is logged, and changes arrive.
func TestConnectionAge(t *testing.T) {
	const (
		age   = 15 * time.Second
		grace = 10 * time.Second // after which istiod cuts a stream that has not ended
		lasts = 3 * time.Minute
	)
	d := start(t, options{args: []string{"--keepaliveMaxServerConnectionAge=" + age.String()}})
	m := d.machine(onlyIPv4)
	a := m.agent(pod{"age", "shop"}, m.plain(d)...)
	d.wantTable(a)
	l := a.load()
	defer l.Stop()
	c := m.connect(dnsAddr)
	defer c.Close()
	var seen []time.Duration
	for begun := time.Now(); time.Since(begun) < lasts; {
		address := fmt.Sprintf("198.51.100.%d", 210+len(seen)%2)
		d.apply(entryOf("age.example.com", address))
		applied := time.Now()
		wait.Until(t, "a change is seen", func() bool { return c.ask("age.example.com", "A") == address })
		seen = append(seen, time.Since(applied))
	}
	wantGood(t, l)
	slices.Sort(seen)
	ends, warned := a.logged("no stream to the control plane", "max_age"), a.logged("level=WARN")
	t.Logf("%d connections ended in %v; %d changes seen after p50 %v, p99 %v, at most %v", ends, lasts, len(seen),
		seen[len(seen)/2].Round(time.Millisecond), seen[len(seen)*99/100].Round(time.Millisecond), seen[len(seen)-1].Round(time.Millisecond))
	if want := int(lasts/(age+grace)) * 3 / 4; ends < want {
		t.Errorf("%d connections ended, want at least %d", ends, want)
	}
	if warned > 0 {
		t.Errorf("%d warnings, see %s", warned, a.log)
	}
	d.wantTable(a)
}
