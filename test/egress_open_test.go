package test

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestEgressOpen changes everything around 200 open connections: they live on, new ones follow the change,
// and DNS is answered in each phase. Only the end of the agent ends them.
func TestEgressOpen(t *testing.T) { // E12, E13, E17
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
		e.serve(addr+":7", greeter(name))
	}
	e.asService("127.0.0.1:"+egressPort, "[::1]:"+egressPort)
	e.flags = append(e.flags, "--drain", "300ms", "--cache-size", "0")
	a := e.held(e.start())
	asker := e.askOften()

	var conns []*openConn
	for range 200 {
		conns = append(conns, e.open())
	}
	live := func(after string) {
		t.Helper()
		for _, conn := range conns {
			conn.lives(after)
		}
		asker.phase(after)
	}
	live("the connections were opened")

	all := map[string][]string{exactA: {vipA, vip6A}, exactB: {vipB, vip6B}, wildcard: {vipWild, vip6Wild}}
	for i := range 5 {
		e.push(map[string][]string{exactA: {vipB, vip6B}, exactB: {vipA, vip6A}}) // each has the other's VIP
		e.await("220 two")
		e.push(map[string][]string{exactB: {vipB, vip6B}})
		e.await("reset")
		e.push(all)
		e.await("220 one")
		conns[i].lives("a push")
	}
	live("15 pushes")

	e.net.Exec("ip", "address", "add", "10.0.0.56/24", "dev", "eth0")
	nameserver(t, e.net, "10.0.0.56", serverB)
	for range 2 {
		e.replace("resolv.conf", "nameserver 10.0.0.56\n")
		e.await("220 two")
		e.replace("resolv.conf", "nameserver 10.0.0.55\n")
		e.await("220 one")
	}
	live("4 changes of resolv.conf")

	a.end(handOver) // the drain is short
	for _, conn := range conns {
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
			t.Fatalf("a connection after the drain: %v, want a reset", err)
		}
	}
	e.held(e.start())
	e.await("220 one")
	asker.phase("a restart")
	if got := e.metric("nametap_egress_open_connections"); got > 1 {
		t.Errorf("%v connections are open in the next agent", got)
	}
}

// await connects to port 7 of vipA until the greeting or the error contains want.
func (e *egressVM) await(want string) {
	e.tb.Helper()
	wait.Until(e.tb, "a connection to "+vipA+" leads to "+want, func() bool { return strings.Contains(e.greeting(vipA, "7"), want) })
}

// An asker sends queries for a mesh name, one after the other.
type asker struct {
	tb testing.TB

	mu     sync.Mutex
	asked  int // in the current phase
	failed int
}

// askOften starts an asker, which ends with the test.
func (e *egressVM) askOften() *asker {
	e.tb.Helper()
	var conn net.Conn
	var err error
	e.Run(func() { conn, err = net.Dial("udp", "10.0.0.55:53") })
	if err != nil {
		e.tb.Fatal(err)
	}
	a := &asker{tb: e.tb}
	stop := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		client := dns.Client{Timeout: loadPatience}
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			began := time.Now()
			reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(exactB+".", dns.TypeAAAA), &dns.Conn{Conn: conn})
			bad := (err != nil || len(reply.Answer) != 1) && !machine.excuses(a.tb, began, time.Now())
			a.mu.Lock()
			a.asked++
			if bad {
				a.failed++
			}
			a.mu.Unlock()
		}
	})
	e.tb.Cleanup(func() { close(stop); conn.Close(); asking.Wait() })
	return a
}

// phase reports the queries since the last phase that have no answer. At least one has.
func (a *asker) phase(name string) {
	a.tb.Helper()
	wait.Until(a.tb, "a query of this phase", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.asked > 0
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed > 0 {
		a.tb.Errorf("until %s: %d of %d queries have no answer", name, a.failed, a.asked)
	}
	a.asked, a.failed = 0, 0
}
