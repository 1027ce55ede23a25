package dnsproxy_test

import (
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// deadZone is a handler that answers every name except names below dead.zone.example, like
// a resolver that waits for that zone's nameservers.
func deadZone(query *dns.Msg, _ string) *dns.Msg {
	name := query.Question[0].Name
	if strings.HasSuffix(name, "dead.zone.example.") {
		return nil
	}
	reply := new(dns.Msg).SetReply(query)
	if query.Question[0].Qtype == dns.TypeA {
		rr, err := dns.NewRR(name + " 60 IN A 192.0.2.1")
		if err != nil {
			panic(err)
		}
		reply.Answer = append(reply.Answer, rr)
	}
	return reply
}

// flood queries names of the dead zone, without waiting for replies, until the test ends.
// It returns after the first n queries.
func flood(t *testing.T, p *proxy, pause time.Duration, first int) {
	t.Helper()
	conn := p.dial(t, "udp")
	stop, sent := make(chan struct{}), make(chan struct{})
	var flooding sync.WaitGroup
	t.Cleanup(func() { close(stop); flooding.Wait(); conn.Close() })
	flooding.Go(func() {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for i := 0; ; i++ {
			packet, err := question(fmt.Sprintf("n%d.dead.zone.example", i), dns.TypeA).Pack()
			if err == nil {
				_, err = conn.Write(packet)
			}
			if err != nil {
				t.Error(err)
				return
			}
			if i == first {
				close(sent)
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	wait.For(t, "the flood begins", sent)
}

// F16, F10: names whose zone's servers are silent do not make other names fail.
func TestDeadZone(t *testing.T) {
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, deadZone))}})
	flood(t, p, 5*time.Millisecond, 400)
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.zone.example A", i), fmt.Sprintf("w%d.zone.example. A 192.0.2.1", i)}})
	}
}

// F16, F10: queries for a dead zone, also one below a live domain, do not use up all places
// of queries in flight.
func TestDeadZonesLeaveRoom(t *testing.T) {
	t.Parallel()
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: servers(nameserver(t, deadZone)), MaxInflight: 64}})
	flood(t, p, time.Millisecond, 500)
	for i := range 30 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.zone.example A", i), fmt.Sprintf("w%d.zone.example. A 192.0.2.1", i)}})
	}
	if n := p.count(t, "nametap_dns_inflight"); n > 64 {
		t.Errorf("%v queries in flight", n)
	}
	if n := p.count(t, "nametap_dns_overflows_total"); n == 0 {
		t.Error("no query of the flood was refused")
	}
}

// F16: dnsmasq answers probes although its own nameserver is dead, so queries for names
// that it knows are not refused during a flood of other names.
func TestDeadZoneBehindDnsmasq(t *testing.T) {
	t.Parallel()
	netns.Need(t, "dnsmasq")
	dead := nameserver(t, fakedns.Silence)
	addr := deadServer(t) // a free port
	args := []string{
		"--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=", "--no-resolv", "--bind-interfaces",
		"--listen-address=127.0.0.1", fmt.Sprintf("--port=%d", addr.Addr.Port()),
		fmt.Sprintf("--server=127.0.0.1#%d", dead.Addr.Port()), "--address=/live.example/192.0.2.1",
	}
	dnsmasq := exec.CommandContext(t.Context(), "dnsmasq", args...)
	if err := dnsmasq.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dnsmasq.Wait() }) // killed by the context
	client := dns.Client{Timeout: time.Second}
	wait.Until(t, "dnsmasq answers", func() bool {
		_, _, err := client.Exchange(question("localhost", dns.TypeA), addr.Addr.String())
		return err == nil
	})
	p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{addr}}})
	flood(t, p, 5*time.Millisecond, 400)
	for i := range 10 {
		p.converse(t, []dialogue{{fmt.Sprintf("w%d.live.example A", i), fmt.Sprintf("w%d.live.example. A 192.0.2.1", i)}})
	}
}
