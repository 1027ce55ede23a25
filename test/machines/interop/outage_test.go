package interop

import (
	"fmt"
	"net/netip"
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

// wantGood reports the load since the last report, and fails if an answer was wrong or none
// came.
func wantGood(t *testing.T, l *load.Load) {
	t.Helper()
	r := l.Cut()
	t.Log(r)
	if r.Bad() > 0 || r.Count(load.Right) == 0 {
		t.Errorf("%d of %d queries have no right answer", r.Bad(), r.Queries)
	}
}

// entry is a ServiceEntry of a host in the namespace shop.
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
// a wrong answer, and no warning is logged.
func TestConnectionAge(t *testing.T) {
	const age, lasts = 15 * time.Second, 3 * time.Minute
	d := start(t, options{args: []string{"--keepaliveMaxServerConnectionAge=" + age.String()}})
	m := d.machine(onlyIPv4)
	a := m.agent(pod{"age", "shop"}, append(m.plain(d), "--log-level", "debug")...)
	d.wantTable(a)
	l := a.load()
	defer l.Stop()
	time.Sleep(lasts) //nolint:forbidigo // the time under load
	wantGood(t, l)
	pushed, warned := a.logged("table pushed"), a.logged("level=WARN")
	t.Logf("%d tables in %v", pushed, lasts)
	// gRPC varies the age by 10 %.
	if want := int(lasts/age) * 3 / 4; pushed < want {
		t.Errorf("%d tables, want at least %d: istiod does not end connections", pushed, want)
	}
	if warned > 0 {
		t.Errorf("%d warnings, see %s", warned, a.log)
	}
	d.wantTable(a)
}
