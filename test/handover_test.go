package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/guard"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// handOver is the RestartKillSignal of nametap.service.
const handOver = syscall.SIGUSR1

// newUnitVM makes a vm whose agents run as in nametap.service: with sockets of systemd, a state
// directory and a guard. guard is the running guard.
func newUnitVM(t *testing.T) (v *vm, guard *agent) {
	t.Helper()
	v = newVM(t, "nft")
	v.sockets = v.systemdSockets()
	v.agentDir("guard")
	// A nameserver on a busy machine may take more than the timeout of newVM.
	v.flags = append(v.flags, "--capture", "--upstream-timeout", "10s", "--state-dir", v.agentDir("state"))
	v.environment = append(v.environment, v.guardEnviron())
	return v, v.startGuard()
}

// guardEnviron is the setting of the guard and of its agents.
func (v *vm) guardEnviron() string {
	return guard.PathEnv + "=" + filepath.Join(v.dir, "guard", "socket")
}

// startGuard starts a guard as in nametap-guard.service.
func (v *vm) startGuard() *agent {
	v.tb.Helper()
	cmd := v.command("capture", "guard", "--capture-backend", v.backend)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Gid: agentID}, Pdeathsig: syscall.SIGKILL, Setsid: true,
	}
	g := v.launchCommand(cmd)
	path := filepath.Join(v.dir, "guard", "socket")
	wait.Until(v.tb, "the guard listens", func() bool {
		info, err := os.Stat(path)
		return err == nil && info.Mode().Perm() == 0o660
	})
	return g
}

// held waits until the rules are installed and guarded.
func (v *vm) held(a *agent) *agent {
	v.tb.Helper()
	wait.Until(v.tb, "DNS is captured", func() bool { return v.metric("nametap_capture_on") == 1 })
	return a
}

// handsOver hands over to the next agent. meanwhile is called when the agent has ended.
func (v *vm) handsOver(a *agent, meanwhile func()) *agent {
	v.tb.Helper()
	a.end(handOver)
	if code := a.ProcessState.ExitCode(); code != 0 {
		v.tb.Errorf("exit code %d:\n%s", code, a.log)
	}
	if meanwhile != nil {
		meanwhile()
	}
	return v.start()
}

// TestHandOversUnderLoad hands over 6 times while applications send queries over UDP and TCP,
// for mesh names and others. No query is lost or refused, and only agents answer.
func TestHandOversUnderLoad(t *testing.T) { // V1
	t.Parallel()
	v, guard := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	for round := range 6 {
		v.more(l, meshIP)
		a = v.handsOver(a, func() {
			if round%3 == 0 && !v.captured() {
				t.Error("the rules are removed")
			}
		})
	}
	v.more(l, meshIP)
	v.noneLost(l)
	if n := l.answers[namedIP]; n != 0 {
		t.Errorf("%d queries for the mesh name are answered by the nameserver", n)
	}
	if n := guard.log.Count("no agent answers"); n != 0 {
		t.Errorf("the guard has removed rules:\n%s", guard.log)
	}
	a.end(terminate)
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
}

// TestHandOverWithoutNext hands over to no agent: the guard removes the rules.
func TestHandOverWithoutNext(t *testing.T) { // V1, V2
	t.Parallel()
	v, guard := newUnitVM(t)
	v.held(v.start()).end(handOver)
	wait.Until(t, "the guard removes the rules", func() bool { return !v.captured() })
	if guard.log.Count("no agent answers: removing the capture rules") != 1 {
		t.Errorf("%s", guard.log)
	}
	v.asked(named, namedIP)
}

// TestHandOverWithoutGuard hands over while there is no guard: the agent removes its rules, and
// the next one captures nothing until it has a guard. A guard that starts when the agent has
// ended removes the rules, too.
func TestHandOverWithoutGuard(t *testing.T) { // V1, V2
	t.Parallel()
	v, guard := newUnitVM(t)
	a := v.held(v.start())
	guard.end(syscall.SIGKILL)
	wait.Until(t, "the agent notices", func() bool { return a.log.Count("nametap-guard cannot be reached") > 0 })
	v.asked(named, meshIP) // the agent keeps the rules
	a.end(handOver)
	if v.captured() {
		t.Errorf("rules are left without a guard:\n%s", v.Rules())
	}
	a = v.start()
	if v.captured() {
		t.Error("rules are installed without a guard")
	}
	wait.Until(t, "nametap status says what is missing", func() bool {
		r := v.nametap("status", "--status-addr", statusAddr)
		return strings.Contains(r.stdout, "capture begins when nametap-guard.service can be reached")
	})
	guard = v.startGuard()
	v.held(a).end(handOver)
	guard.end(syscall.SIGKILL)
	if !v.captured() {
		t.Error("the rules are removed although they were handed over")
	}
	v.startGuard()
	wait.Until(t, "the next guard removes the rules", func() bool { return !v.captured() })
	v.asked(named, namedIP)
}

// TestGuardDiesUnderLoad kills the guard while the agent answers, and while it hands over. The
// next guard finds the agent, so no query is lost.
func TestGuardDiesUnderLoad(t *testing.T) { // V1
	t.Parallel()
	v, guard := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	for range 5 {
		v.more(l, meshIP)
		guard.end(syscall.SIGKILL)
		guard = v.startGuard()
		v.more(l, meshIP)
		a = v.handsOver(a, func() {
			guard.end(syscall.SIGKILL)
			guard = v.startGuard()
		})
		v.held(a)
	}
	v.noneLost(l)
}

// TestHandOverMeets changes things while no agent runs: the table, nameservers, the switch. The
// next agent uses the current state. A name that was cached is queried again.
func TestHandOverMeets(t *testing.T) { // V1, C7, F5, F14, K9
	t.Parallel()
	v, _ := newUnitVM(t)
	path := v.write("mesh", meshConfig(true))
	v.flags = append(v.flags, "--mesh-config", path)
	v.resolvConf = v.write("resolv.conf", "nameserver "+named+"\n")
	knows(v.named, namedIP, "60")
	knows(v.other, otherIP, "60")
	a := v.held(v.start())
	ask := func(name, want string) {
		t.Helper()
		if got := v.dig("-p", "15053", "@127.0.0.1", name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	ask("www.example.org", namedIP)
	const later = "10.1.0.9"
	a = v.handsOver(a, func() {
		v.replace("resolv.conf", "nameserver "+other+"\n")
		v.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
			mesh: {Ips: []string{later}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		}})
	})
	ask("www.example.org", otherIP)
	wait.Until(t, "the push is in use", func() bool { return v.dig("@"+named, mesh) == later })
	v.held(a)
	a = v.handsOver(a, func() { v.replace("mesh", meshConfig(false)) })
	wait.Until(t, "the switch is followed", func() bool { return !v.captured() })
	v.asked(named, "NXDOMAIN")
	a = v.handsOver(a, func() {
		if v.captured() {
			t.Error("captured while the switch is off")
		}
		v.replace("mesh", meshConfig(true))
	})
	v.held(a)
	v.xds.Stop()
	v.handsOver(a, nil)
	v.asked(named, later) // of the snapshot
}

// TestHandOverInFlight hands over while a nameserver has the queries of two clients: the agent
// answers both before it ends.
func TestHandOverInFlight(t *testing.T) { // V1
	t.Parallel()
	v, _ := newUnitVM(t)
	a := v.held(v.start())
	asked, answer := make(chan struct{}, 8), make(chan struct{})
	has := anyName(namedIP)
	v.named.Handle(func(query *dns.Msg, network string) *dns.Msg {
		asked <- struct{}{}
		<-answer
		return has(query, network)
	})
	answers := make(chan string, 2)
	for _, network := range []string{"udp", "tcp"} {
		go v.Run(func() {
			conn, err := dns.DialTimeout(network, named+":53", wait.Limit)
			if err != nil {
				answers <- fmt.Sprint(network, err)
				return
			}
			defer conn.Close()
			got, err := askOn(conn, network+".example.org")
			answers <- fmt.Sprint(network, " ", got, " ", err)
		})
	}
	for range 2 {
		wait.For(t, "the nameserver has a query", asked)
	}
	if err := a.Process.Signal(handOver); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the agent ends", func() bool { return a.log.Count("ending without a drain") > 0 })
	close(answer)
	for range 2 {
		if got := wait.For(t, "an answer", answers); !strings.HasSuffix(got, " "+namedIP+" <nil>") {
			t.Error(got)
		}
	}
	wait.For(t, "the agent has ended", a.ended)
}

// TestHandOverAndDrain mixes both signals. The first one counts: after SIGTERM the rules are
// removed, also if the agent drains, and after a hand-over they stay.
func TestHandOverAndDrain(t *testing.T) { // V1, V4
	t.Parallel()
	for name, test := range map[string]struct {
		flags   []string
		signals []syscall.Signal
		stay    bool
	}{
		"stop, then hand-over":          {signals: []syscall.Signal{terminate, handOver}},
		"drain, then hand-over":         {signals: []syscall.Signal{terminate, handOver, terminate}, flags: []string{"--drain", "1h"}},
		"hand-over, then stop":          {signals: []syscall.Signal{handOver, terminate}, stay: true},
		"hand-over, with a drain":       {signals: []syscall.Signal{handOver}, flags: []string{"--drain", "1h"}, stay: true},
		"hand-over twice, then a third": {signals: []syscall.Signal{handOver, handOver, handOver}, stay: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v, _ := newUnitVM(t)
			a := v.held(v.start(test.flags...))
			for i, signal := range test.signals {
				_ = a.Process.Signal(signal) // it may have ended
				if i == 0 {
					wait.Until(t, "the agent ends", func() bool { return a.log.Count("drain") > 0 })
				}
			}
			wait.For(t, "the agent has ended", a.ended)
			if code := a.ProcessState.ExitCode(); code != 0 || v.captured() != test.stay {
				t.Errorf("exit code %d, rules:\n%s\n%s", code, v.Rules(), a.log)
			}
			if test.stay {
				began := time.Now()
				v.start()
				v.asked(named, meshIP)
				t.Logf("the next agent answers after %v", time.Since(began))
			}
		})
	}
}

// TestHandOverWithoutResolvConf hands over and kills while resolv.conf is empty or missing, as while
// a program rewrites it. The next agent keeps the search list and the nameservers of before.
func TestHandOverWithoutResolvConf(t *testing.T) { // V1, F5, V6
	t.Parallel()
	v, _ := newUnitVM(t)
	v.notifications()
	v.environment = append(v.environment, "RUNTIME_DIRECTORY="+v.agentDir("run"))
	const text = "search corp.example\nnameserver " + named + "\n"
	v.write("resolv.conf", text)
	a := v.held(v.start())
	check := func(server, want string) {
		t.Helper()
		for name, want := range map[string]string{"web.shop.corp.example": meshIP, "www.example.org": want} {
			if got := v.dig("-p", "15053", "@127.0.0.1", name); got != want {
				t.Errorf("%s: %s, want %s of %s", name, got, want, server)
			}
		}
	}
	check(named, namedIP)
	a = v.handsOver(a, func() { v.write("resolv.conf", "") })
	check(named, namedIP)
	v.write("resolv.conf", strings.Replace(text, named, other, 1))
	wait.Until(t, "the change is in use", func() bool { return a.log.Count("resolv.conf has changed") > 0 })
	if err := os.Remove(v.resolvConf); err != nil {
		t.Fatal(err)
	}
	a.end(syscall.SIGKILL)
	v.start()
	check(other, otherIP)
}

// TestKillsUnderLoad kills the agent 6 times while applications send queries. Almost no query for
// a mesh name is lost: over UDP the agent answers one before it reads the next.
func TestKillsUnderLoad(t *testing.T) { // V1
	t.Parallel()
	v, _ := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	const kills = 6
	for range kills {
		v.more(l, meshIP)
		a.end(syscall.SIGKILL)
		a = v.held(v.start())
	}
	v.more(l, meshIP)
	answers := l.end()
	if n := answers[namedIP]; n > 0 {
		t.Errorf("%d queries for the mesh name are answered by the nameserver", n)
	}
	lost := map[string]int{}
	for answer, n := range answers {
		if what, _, is := strings.Cut(answer, " after "); is {
			lost[what] += n
		}
	}
	t.Logf("with %d kills: %v", kills, lost)
	if lost["lost"] > kills {
		t.Errorf("%d queries for the mesh name are lost", lost["lost"])
	}
}
