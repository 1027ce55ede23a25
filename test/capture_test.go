package test

import (
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestCapture checks the queries of applications to the nameserver of resolv.conf, with
// rules from the agent itself, as on a VM, and from an init container.
func TestCapture(t *testing.T) { // K1, K4, K9, R1
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		before := v.Rules()
		v.flags = append(v.flags, "--upstream-timeout", "8s") // as the machine may be busy
		a := v.capture()
		v.resolves()
		a.end(terminate)
		if after := v.Rules(); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
		v.asked(named, namedIP)

		v.capabilities = nil
		v.start()
		if r := v.root(v.args("apply")...); r.code != 0 || !strings.Contains(r.stdout, "backend   "+v.backend+": other programs have ") {
			t.Fatalf("%+v", r)
		}
		v.resolves()
	})
}

// resolves queries a mesh name and a forwarded name, over both families, UDP and TCP.
func (v *vm) resolves() {
	t := v.tb
	t.Helper()
	v.named.Reset()
	v.named6.Reset()
	for _, server := range []string{named, named6} {
		conf := "nameserver " + server + "\nsearch shop.svc.cluster.local\n"
		for _, over := range []string{"+notcp", "+tcp"} {
			for name, want := range map[string]string{mesh: meshIP, "www.example.org": namedIP} {
				// dig reports a reply from another address.
				output := v.client(conf, "dig", "+tries=1", "+timeout=300", over, name)
				if !strings.Contains(output, "\t"+want+"\n") || !strings.Contains(output, "SERVER: "+server+"#53") || strings.Contains(output, "unexpected") {
					t.Errorf("dig %s, of %s:\n%s", over, server, output)
				}
			}
		}
		for _, options := range []string{"", "options use-vc\n"} { // TCP
			for name, want := range map[string]string{mesh: meshIP, "web": meshIP, "www.example.org": namedIP} {
				if output := v.client(conf+options, "getent", "ahosts", name); !strings.HasPrefix(output, want+" ") {
					t.Errorf("getaddrinfo of %s by %s%s:\n%s", name, conf, options, output)
				}
			}
		}
	}
	reached := 0
	for _, q := range append(v.named.Queries(), v.named6.Queries()...) {
		if strings.Contains(q.Name, "shop.svc.cluster.local") {
			t.Errorf("the nameserver received a query for %s", q.Name)
		}
		reached++
	}
	if reached == 0 {
		t.Error("no query has reached the nameserver")
	}
}

// TestOtherAddress checks that rules redirect to the port of the agent, and only for
// families in which it listens.
func TestOtherAddress(t *testing.T) { // K1, K4, K17
	t.Parallel()
	v := newVM(t, "auto")
	for _, test := range []struct{ address, want4, want6 string }{
		{"localhost:5300", meshIP, meshIP}, {":5301", meshIP, meshIP},
		{"127.0.0.1:5302", meshIP, namedIP}, {"[::1]:5303", namedIP, meshIP}, {"0.0.0.0:5304", meshIP, namedIP},
	} {
		a := v.capture("--dns-addr", test.address)
		v.asked(named, test.want4)
		v.asked(named6, test.want6)
		a.end(syscall.SIGKILL) // the next agent finds these rules
	}
	v.root(v.args("remove", "--after-agent")...)
	for _, flags := range [][]string{
		{"--dns-addr", self + ":5300"},
		{"--dns-addr", "localhost:53"},
		{"--capture-virtual-interface", "eth1"}, // its queries arrive at its address
	} {
		r := v.root(v.args("apply", flags...)...)
		if r.code != 2 || !strings.Contains(r.stderr, ": want ") || v.captured() {
			t.Errorf("%v: %+v", flags, r)
		}
	}
}

// TestPortTaken checks that rules never redirect to another program that has the port: the
// agent captures the other family alone.
func TestPortTaken(t *testing.T) { // K4, K9, K17
	t.Parallel()
	for _, taken := range []string{"udp 127.0.0.1", "tcp ::1"} {
		t.Run(taken, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "auto")
			network, address, _ := strings.Cut(taken, " ")
			v.take(network, net.JoinHostPort(address, "15053"))
			before := v.Rules()
			want4, want6 := meshIP, namedIP
			if address == "127.0.0.1" {
				want4, want6 = namedIP, meshIP
			}
			a := v.capture()
			v.asked(named, want4)
			v.asked(named6, want6)
			if r := v.nametap("status", "--status-addr", statusAddr); strings.Count(r.stdout, "not wanted: the agent does not listen where the rules redirect to") != 1 {
				t.Errorf("status: %+v", r)
			}
			a.end(terminate)
			if after := v.Rules(); after != before {
				t.Errorf("rules before:\n%s\nand after:\n%s", before, after)
			}
		})
	}
}

// TestPortTakenForAWhile checks that the agent serves a port once another program has freed
// it, also with sockets from a supervisor.
func TestPortTakenForAWhile(t *testing.T) { // R3, K15, K17
	t.Parallel()
	v := newVM(t, "nft")
	release := v.take("udp", dnsAddr)
	a := v.launch("--supervise", "--capture")
	wait.Until(t, "a listener is missing", func() bool { return a.log.Count("address already in use") > 1 })
	wait.Until(t, "IPv6 is captured", func() bool { return v.digSoon("@"+named6, mesh) == meshIP })
	v.asked(named, namedIP)
	release()
	wait.Until(t, "IPv4 is captured", func() bool { return v.digSoon("@"+named, mesh) == meshIP })
	v.asked(named6, meshIP)
}

// take opens a socket like another program, until the test ends or calls release.
func (v *vm) take(network, address string) (release func()) {
	v.tb.Helper()
	var socket io.Closer
	var err error
	v.Run(func() {
		if network == "udp" {
			socket, err = net.ListenPacket(network, address)
		} else {
			socket, err = net.Listen(network, address)
		}
	})
	if err != nil {
		v.tb.Fatal(err)
	}
	release = sync.OnceFunc(func() { _ = socket.Close() }) // nothing was written
	v.tb.Cleanup(release)
	return release
}

// TestStartAndEndUnderLoad checks that no query is lost when rules are installed and
// removed with the agent.
func TestStartAndEndUnderLoad(t *testing.T) { // K9, R2
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		l := v.load()
		for range 2 {
			v.more(l, namedIP)
			a := v.capture()
			v.more(l, meshIP)
			a.end(terminate)
			if a.ProcessState.ExitCode() != 0 || v.captured() {
				t.Fatalf("%v, rules are left:\n%s", a.ProcessState, v.Rules())
			}
		}
		v.more(l, namedIP)
		v.noneLost(l, true)
	})
}

// TestAgentKilled checks that DNS works after an agent was killed and its service manager
// has run the command for that. Before that, and with --capture-fail-open=false, queries
// are refused at once. The next agent takes over the rules.
func TestAgentKilled(t *testing.T) { // K9, K12
	t.Parallel()
	v := newVM(t, "nft")
	for _, failOpen := range []string{"true", "false"} {
		a := v.capture("--capture-fail-open=" + failOpen)
		for _, server := range []string{named, named6} {
			v.asked(server, meshIP)
		}
		a.end(syscall.SIGKILL)
		killed := time.Now()
		for _, server := range []string{named, named6} {
			err := v.refused(server)
			if (err == nil || !strings.Contains(err.Error(), "connection refused")) && !machine.excuses(t, killed, time.Now()) {
				t.Errorf("%s says %v", server, err)
			}
		}
		ended := make(chan result)
		go func() { ended <- v.nametap(v.args("remove", "--after-agent", "--capture-fail-open="+failOpen)...) }()
		if failOpen == "true" {
			wait.Until(t, "DNS answers", func() bool { return v.refused(named) == nil })
		}
		if r := <-ended; r.code != 0 {
			t.Errorf("%+v", r)
		}
		if v.captured() != (failOpen == "false") {
			t.Errorf("--capture-fail-open=%s:\n%s", failOpen, v.Rules())
		}
	}
	v.capture()
	v.asked(named, meshIP)
	v.asked(named6, meshIP)
}

// TestServers checks that only queries to the current nameservers of resolv.conf are
// captured.
func TestServers(t *testing.T) { // K6, F1
	t.Parallel()
	v := newVM(t, "nft")
	v.capture("--capture-servers", "resolv-conf")
	v.asked(named, meshIP)
	v.asked(other, otherIP)
	v.replace("resolv.conf", "nameserver "+other+"\nnameserver "+other6+"\n")
	v.becomes(other6, meshIP)
	v.asked(other, meshIP)
	v.asked(other6, meshIP)
	v.asked(named, namedIP)
}
