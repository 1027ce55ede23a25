package test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// afterAgent runs what back-off does after a start that has failed, and returns its log.
func (v *vm) afterAgent() string {
	v.tb.Helper()
	r := v.nametap("capture", "remove", "--after-agent", "--unless-leased")
	if r.code != 0 {
		v.tb.Errorf("capture remove --after-agent: %+v", r)
	}
	return r.stderr
}

// ends checks that queries of a client reach the nameserver in time after the last answer of an agent, at
// began, as far as the machine did not stand still. The client keeps its socket.
func (v *vm) ends(began time.Time) {
	v.tb.Helper()
	v.Run(func() {
		conn, err := dns.Dial("udp", named+":53")
		if err != nil {
			v.tb.Fatal(err)
		}
		defer conn.Close()
		client := dns.Client{Timeout: 200 * time.Millisecond}
		wait.Until(v.tb, "the nameserver answers", func() bool {
			reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(mesh), dns.TypeA), conn)
			return err == nil && len(reply.Answer) == 1 && strings.HasSuffix(reply.Answer[0].String(), namedIP)
		})
	})
	took := time.Since(began)
	still := machine.between(v.tb, began, time.Now())
	v.tb.Logf("the nameserver answers after %v, in which the machine stood still for %v", took, still)
	if took-still > 4*iptables.LeaseTime {
		v.tb.Errorf("the nameserver answers after %v, want %v", took, iptables.LeaseTime)
	}
}

// TestHandOverWithoutNext hands over to no agent, and kills an agent that no other follows: the kernel ends
// the capture. The next agent captures with the rules that are there.
func TestHandOverWithoutNext(t *testing.T) { // V1, V2
	t.Parallel()
	for name, signal := range map[string]syscall.Signal{"hand-over": handOver, "kill": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newUnitVM(t)
			a := v.steady(v.held(v.start()))
			rules := v.Rules()
			a.end(signal)
			began := time.Now()
			log, now := v.afterAgent(), v.Rules()
			if (log != "" || now != rules) && stoodStill(t) {
				return // the lease had ended
			} else if log != "" || now != rules {
				t.Errorf("after the agent: %s, rules:\n%s\nbefore:\n%s", log, now, rules)
			}
			v.ends(began)
			v.asked(named, namedIP)
			a = v.held(v.start())
			v.asked(named, meshIP)
			if n := a.log.Count("DNS is captured"); n != 0 { // with other rules
				t.Errorf("the rules were replaced:\n%s", a.log)
			}
		})
	}
}

// TestAfterAgent checks when back-off removes rules: when the kernel has ended the capture. nametap-rules.service
// removes them at once. No set is left, either.
func TestAfterAgent(t *testing.T) { // V2, V4
	t.Parallel()
	v := newUnitVM(t)
	v.held(v.start()).end(syscall.SIGKILL)
	began := time.Now()
	v.afterAgent()
	if !v.captured() && !machine.excuses(t, began, time.Now()) {
		t.Error("the rules are removed while another agent may take them over")
	}
	v.ends(began)
	v.afterAgent()
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
	v.held(v.start()).end(syscall.SIGKILL)
	if r := v.root("capture", "remove", "--after-agent"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	v.asked(named, namedIP)
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
}

// TestAgentsDieAtStart starts agents that die before they answer, one after the other. Only the first renews
// the lease of the agent before, so they do not keep the capture alive.
func TestAgentsDieAtStart(t *testing.T) { // V2
	t.Parallel()
	v := newUnitVM(t)
	v.held(v.start()).end(syscall.SIGKILL)
	// An agent waits for its snapshot before it answers.
	snapshot := filepath.Join(v.dir, "state", "nametable.snapshot")
	if err := errors.Join(os.RemoveAll(snapshot), syscall.Mkfifo(snapshot, 0o666), os.Chmod(snapshot, 0o666)); err != nil {
		t.Fatal(err)
	}
	dies := func() {
		a := v.launch()
		wait.Until(t, "the agent has started", func() bool { return v.get("/healthz/live") != "" })
		a.end(syscall.SIGKILL)
	}
	dies()
	stop, stopped := make(chan struct{}), make(chan int)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				stopped <- n
				return
			default:
			}
			v.write("nametap/starts", "2\n") // back-off does not wait
			dies()
		}
	}()
	defer func() { t.Logf("%d starts", <-stopped) }()
	defer close(stop)
	v.ends(time.Now())
}

// TestLeaseOfReplies queries the agent from the ports of requests about the lease, as any user may where sysctl
// lets them bind such ports. Its replies arrive, and change nothing.
func TestLeaseOfReplies(t *testing.T) { // V2
	t.Parallel()
	v := newVM(t, "nft")
	v.Exec("sysctl", "-qw", "net.ipv4.ip_unprivileged_port_start=0")
	v.capture()
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		for port := range uint16(4) {
			var got string
			var err error
			v.Run(func() {
				got, err = askFrom(65534, netip.AddrPortFrom(netip.MustParseAddr(loopback), 1+port), loopback, mesh)
			})
			if err != nil || got != meshIP {
				t.Fatalf("from port %d of %s: %s, %v", 1+port, loopback, got, err)
			}
		}
	}
	v.asked(named6, meshIP)
}

// TestAgentIsStopped stops an agent by SIGSTOP, under load: nameservers answer until it goes on. It answers
// what waited.
func TestAgentIsStopped(t *testing.T) { // V2
	t.Parallel()
	v := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	for range 2 {
		v.more(l, meshIP)
		if err := a.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		v.ends(time.Now())
		if err := a.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		v.more(l, meshIP)
	}
	v.noneLost(l, true)
}

// TestSecondAgent starts a second agent: it leaves the rules to the first until that ends, and each names the other.
func TestSecondAgent(t *testing.T) { // K23
	t.Parallel()
	v := newVM(t, "nft")
	first := v.capture()
	second := v.launch("--capture", "--dns-addr", "localhost:15063", "--status-addr", "127.0.0.1:15064")
	names := func(a, other *agent) bool { return a.log.Count(fmt.Sprintf("process %d of", other.Process.Pid)) == 1 }
	wait.Until(t, "each names the other", func() bool { return names(first, second) && names(second, first) })
	v.asked(named, meshIP)
	if n := first.log.Count("drifted") + second.log.Count("DNS is captured"); n > 0 {
		t.Errorf("both keep the rules:\n%s\n%s", first.log, second.log)
	}
	first.end(syscall.SIGKILL)
	wait.Until(t, "the second captures", func() bool { return second.log.Count("DNS is captured") == 1 })
	v.asked(named, meshIP)
}

// TestSeatIsBound starts an agent while another program has the name of the seat, and does not listen.
func TestSeatIsBound(t *testing.T) { // K23
	t.Parallel()
	v := newVM(t, "nft")
	v.Run(func() {
		socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(socket, &unix.SockaddrUnix{Name: "@nametap-capture"})
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	v.capture()
	v.asked(named, meshIP)
}

// TestHandOverAtOnce hands over before the agent knows of its rules: those of the previous agent stay.
func TestHandOverAtOnce(t *testing.T) { // V1
	t.Parallel()
	v := newUnitVM(t)
	v.steady(v.held(v.start())).end(handOver)
	a := v.launch()
	wait.Until(t, "the agent has started", func() bool { return a.log.Count("msg=ready") > 0 })
	a.end(handOver)
	if a.log.Count("draining") > 0 || !v.captured() {
		t.Errorf("the rules are removed:\n%s", a.log)
	}
}

// withoutRecent makes iptables of the host's agents lack the match recent.
func (v *vm) withoutRecent() {
	v.tb.Helper()
	for _, name := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
		path, err := exec.LookPath(name)
		if err != nil {
			v.tb.Fatal(err)
		}
		v.script(name, fmt.Sprintf(`#!/bin/sh
input=$(cat)
case $input in *"-m recent"*)
	echo "%[1]s: Couldn't load match recent:No such file or directory" >&2
	exit 2
esac
echo "$input" | exec %[1]s "$@"
`, path))
	}
	v.environment = append(v.environment, "PATH="+v.dir+":"+os.Getenv("PATH"))
}

// TestKernelWithoutLease runs agents where iptables has no match recent. Without a lease, a hand-over removes
// the rules. Those of an agent that was killed stay for the next one, and back-off removes them if that fails.
func TestKernelWithoutLease(t *testing.T) { // V1, V2, K13
	t.Parallel()
	v := newUnitVM(t)
	v.withoutRecent()
	a := v.held(v.start())
	v.asked(named, meshIP)
	wait.Until(t, "nametap status says what is missing", func() bool {
		r := v.nametap("status", "--status-addr", statusAddr)
		return strings.Contains(r.stdout, "end by the kernel (match recent)")
	})
	a.end(handOver)
	if v.captured() {
		t.Errorf("rules are left that nothing would end:\n%s", v.Rules())
	}
	a = v.held(v.start())
	a.end(syscall.SIGKILL)
	if !v.captured() {
		t.Error("the rules have a lease")
	}
	v.afterAgent()
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
	v.asked(named, namedIP)
}
