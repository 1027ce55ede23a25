package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// healthyFor is how long a host is watched: problems are raised after 15 s.
const healthyFor = 20 * time.Second

// R15: on odd hosts without a defect the agent finds no problem while clients query, and doctor says nothing.
func TestHealthyHosts(t *testing.T) {
	t.Parallel()
	netns.Need(t, "unshare", "dnsmasq")
	examine(t, healthyHosts(), func(e *examined, _ hostCase) { e.stays() })
}

// stays watches a host that has no problem, and runs doctor at the end.
func (e *examined) stays() {
	e.tb.Helper()
	begun := time.Now()
	for begun.Add(healthyFor).After(time.Now()) {
		now := time.Now()
		time.Sleep(time.Second) //nolint:forbidigo // the agent asks once a second
		if text := e.health(); strings.HasSuffix(text, "\nready\n") {
			continue
		} else if !machine.excuses(e.tb, now.Add(-healthyFor), now) {
			e.tb.Fatalf("the agent says: %s", text)
		}
		return // what it has found on this machine does not count
	}
	now := time.Now()
	if r := e.doctor(); (r.code != 0 || strings.Contains(r.stdout, "PROBLEM") || strings.Contains(r.stdout, "WARNING")) && !machine.excuses(e.tb, now.Add(-healthyFor), time.Now()) {
		e.tb.Errorf("doctor says: %d %s%s", r.code, r.stdout, r.stderr)
	}
}

func healthyHosts() []hostCase {
	asked := func(e *examined, flags ...string) {
		e.capture(flags...)
		e.asks(10, dnsAddr, numbered)
		e.asks(5, named+":53", numbered)
	}
	return []hostCase{
		{name: "odd in many ways", make: func(e *examined) {
			file := e.write("of-another-program", "nameserver "+named+"\nnameserver "+other+"\nsearch a.example b.example c.example d.example e.example f.example g.example\n")
			e.Exec("ln", "-sf", file, e.resolvConf)
			e.files["/etc/nsswitch.conf"] = "hosts: mymachines resolve [!UNAVAIL=return] files myhostname dns\n"
			e.named.Handle(failingBelow("bogus.example.", fakedns.Answer("www.example.org. 60 IN A 192.0.2.1"))) // most names do not exist
			asked(e, "--upstream", "corp.example="+other, "--local-only", "lab.example")
			for _, domain := range []string{"bogus.example.", "corp.example.", "lab.example."} {
				e.asks(5, dnsAddr, func(i int) string { return fmt.Sprintf("w%d.%s", i, domain) })
			}
		}},
		{name: "no IPv6", make: func(e *examined) {
			e.Exec("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
			e.Exec("sysctl", "-qw", "net.ipv6.conf.default.disable_ipv6=1")
			asked(e)
		}},
		{name: "IPv6 only, with NAT64", make: func(e *examined) {
			e.Exec("ip", "-4", "address", "flush", "dev", "eth0")
			e.named6.Handle(anyName("64:ff9b::c000:235"))
			e.replace("resolv.conf", "nameserver "+named6+"\n")
			e.capture()
			e.asks(10, "[::1]:15053", numbered)
			e.asks(5, "["+named6+"]:53", numbered)
		}},
		{name: "a VPN with its own nameserver", make: func(e *examined) {
			const vpn = "10.8.0.53"
			far := netns.New(e.tb)
			netns.Connect(netns.End{NS: e.NS, Name: "tun0", Addrs: []string{"10.8.0.2/32"}}, netns.End{NS: far, Name: "tun0", Addrs: []string{vpn + "/32"}})
			e.Exec("ip", "route", "add", vpn, "dev", "tun0")
			far.Exec("ip", "route", "add", "10.8.0.2", "dev", "tun0")
			nameserver(e.tb, far, vpn, namedIP)
			e.replace("resolv.conf", "nameserver "+vpn+"\nnameserver "+named+"\n")
			asked(e)
			e.asks(5, vpn+":53", numbered)
		}},
		{name: "systemd-resolved's stub", make: func(e *examined) {
			e.stub()
			e.replace("resolv.conf", "nameserver "+stubAddr+"\noptions edns0 trust-ad\nsearch .\n")
			asked(e)
			e.asks(5, stubAddr+":53", numbered)
		}},
		{name: "one packet of 100 is lost, and long answers come over TCP", make: func(e *examined) {
			e.named.Handle(fakedns.Truncate(anyName(namedIP)), fakedns.OnUDP(fakedns.Loss(.02, 1)))
			asked(e)
		}},
		{name: "capture is off in the mesh config", make: func(e *examined) {
			e.start("--capture", "--mesh-config", e.write("mesh.yaml", meshConfig(false)))
			e.asks(10, dnsAddr, numbered)
		}},
		{name: "a firewall loads its rules again", make: func(e *examined) {
			asked(e)
			for range 3 {
				e.Exec("iptables-nft", "-w", "-t", "nat", "-F", "OUTPUT")
				e.hooked()
			}
		}},
		{name: "resolv.conf names the agent only", make: func(e *examined) {
			e.replace("resolv.conf", "nameserver 127.0.0.1\n")
			e.flags, e.capabilities = append(e.flags, "--dns-addr", "127.0.0.1:53"), append(e.capabilities, capNetBindService)
			e.start("--upstream", named)
			e.asks(10, "127.0.0.1:53", numbered)
		}},
	}
}

// failingBelow returns a handler that answers SERVFAIL below a domain.
func failingBelow(domain string, handler fakedns.Handler) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		if dns.IsSubDomain(domain, query.Question[0].Name) {
			return new(dns.Msg).SetRcode(query, dns.RcodeServerFailure)
		}
		return handler(query, network)
	}
}

// hooked waits until queries are redirected.
func (e *examined) hooked() {
	e.tb.Helper()
	wait.Until(e.tb, "queries are redirected", func() bool { return strings.Contains(e.Exec("iptables-nft-save", "-t", "nat"), "-j NAMETAP_OUTPUT") })
}
