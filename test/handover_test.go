package test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// handOver is the RestartKillSignal of nametap.service.
const handOver = syscall.SIGUSR1

// newUnitVM makes a vm whose agents run as in nametap.service.
func newUnitVM(t *testing.T) *vm {
	t.Helper()
	v := newVM(t, "nft")
	v.asService()
	v.flags = append(v.flags, "--upstream-timeout", "10s")
	return v
}

// asService lets the agents of a vm capture, and run as in nametap.service: by back-off, with its
// directories, and on sockets of systemd, which may have more streams.
func (v *vm) asService(streams ...string) {
	v.tb.Helper()
	v.sockets = v.systemdSockets(streams...)
	v.flags = append(v.flags, "--capture", "--state-dir", v.agentDir("state"))
	text, err := os.ReadFile("../deploy/systemd/back-off")
	if err != nil {
		v.tb.Fatal(err)
	}
	v.wrapper = v.script("back-off", string(text))
	path := filepath.Join(v.dir, "service")
	notified, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err != nil {
		v.tb.Fatal(err)
	}
	v.tb.Cleanup(func() { notified.Close() })
	if err := os.Chmod(path, 0o777); err != nil {
		v.tb.Fatal(err)
	}
	go func() {
		for err := error(nil); err == nil; { // until the test has ended
			_, err = notified.Read(make([]byte, 512))
		}
	}()
	v.environment = append(v.environment, "NOTIFY_SOCKET="+path, "RUNTIME_DIRECTORY="+v.agentDir("nametap"))
}

// missed matches the metric of a nameserver whose clients do not reach the agent, as far as it knows.
var missed = regexp.MustCompile(`nametap_capture_reached\{.*\} 0`)

// held waits until queries are captured.
func (v *vm) held(a *agent) *agent {
	v.tb.Helper()
	wait.Until(v.tb, "DNS is captured", func() bool {
		metrics := v.get("/metrics")
		return strings.Contains(metrics, "\nnametap_capture_on 1\n") && strings.Contains(metrics, "nametap_capture_reached{") && !missed.MatchString(metrics)
	})
	return a
}

// steady waits until the agent counts as one that has started well.
func (v *vm) steady(a *agent) *agent {
	v.tb.Helper()
	wait.Until(v.tb, "the agent has been ready for some time", func() bool {
		_, err := os.Stat(filepath.Join(v.dir, "nametap", "starts"))
		return os.IsNotExist(err)
	})
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

// TestHandOversUnderLoad hands over 4 times while applications send queries over UDP and TCP,
// for mesh names and others. No query is lost or refused, and only agents answer.
func TestHandOversUnderLoad(t *testing.T) { // V1
	t.Parallel()
	v := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	for round := range 4 {
		v.more(l, meshIP)
		a = v.handsOver(a, func() {
			if round == 0 && !v.captured() {
				t.Error("the rules are removed")
			}
		})
	}
	v.more(l, meshIP)
	v.noneLost(l, false)
	a.end(terminate)
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
}

// TestHandOverMeets changes things while no agent runs: the table, nameservers, the switch. The
// next agent uses the current state. A name that was cached is queried again.
func TestHandOverMeets(t *testing.T) { // V1, C7, F5, F14, K9
	t.Parallel()
	v := newUnitVM(t)
	path := v.write("mesh", meshConfig(true))
	v.flags = append(v.flags, "--mesh-config", path)
	v.resolvConf = v.write("resolv.conf", "nameserver "+named+"\n")
	v.named.Handle(fakedns.Answer("www.example.org. 60 IN A " + namedIP))
	v.other.Handle(fakedns.Answer("www.example.org. 60 IN A " + otherIP))
	a := v.held(v.start())
	ask := func(name, want string) {
		t.Helper()
		v.digs(want, "-p", "15053", "@127.0.0.1", name)
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
	wait.Until(t, "the push is in use", func() bool { return v.digSoon("@"+named, mesh) == later })
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
	v := newUnitVM(t)
	a := v.held(v.start("--upstream-timeout", "1m"))
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
			conn, err := dns.DialTimeout(network, named+":53", patience)
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
			v := newUnitVM(t)
			a := v.held(v.start(test.flags...))
			for i, signal := range test.signals {
				_ = a.Process.Signal(signal) // it may have ended
				if i == 0 {
					wait.Until(t, "the agent ends", func() bool { return a.log.Count(`msg="draining`)+a.log.Count("without a drain") > 0 })
				}
			}
			wait.For(t, "the agent has ended", a.ended)
			if code := a.ProcessState.ExitCode(); code != 0 || v.captured() != test.stay {
				t.Errorf("exit code %d, rules:\n%s\n%s", code, v.Rules(), a.log)
			}
			if test.stay {
				v.start()
				v.asked(named, meshIP)
			}
		})
	}
}

// TestKillsUnderLoad kills the agent several times while applications send queries. Almost no query for
// a mesh name is lost: over UDP the agent answers one before it reads the next. None is answered by a nameserver.
func TestKillsUnderLoad(t *testing.T) { // V1
	t.Parallel()
	v := newUnitVM(t)
	a := v.held(v.start())
	l := v.load()
	const kills = 4
	for range kills {
		v.more(l, meshIP)
		v.steady(a).end(syscall.SIGKILL)
		a = v.held(v.start())
	}
	v.more(l, meshIP)
	answers := l.end()
	t.Logf("with %d kills: %v", kills, answers)
	if n := answers[namedIP]; n > 0 {
		t.Errorf("%d queries for the mesh name are answered by the nameserver", n)
	}
	n := 0
	for answer, times := range answers {
		if strings.HasPrefix(answer, lost) && !strings.HasSuffix(answer, forwarded) {
			n += times
		}
	}
	if n > kills {
		t.Errorf("%d queries for the mesh name are lost", n)
	}
}

// TestStopBeforeCapture stops an agent before it captures. The rules that the agent before it has handed over go, too.
func TestStopBeforeCapture(t *testing.T) { // V4
	t.Parallel()
	v := newUnitVM(t)
	v.held(v.start()).end(handOver)
	if !v.captured() {
		t.Error("the hand-over leaves no rules")
	}
	snapshot := filepath.Join(v.dir, "state", "nametable.snapshot") // for which the agent waits before it answers
	if err := errors.Join(os.RemoveAll(snapshot), syscall.Mkfifo(snapshot, 0o666), os.Chmod(snapshot, 0o666)); err != nil {
		t.Fatal(err)
	}
	a := v.launch()
	wait.Until(t, "the agent has started", func() bool { return v.get("/healthz/live") != "" })
	if err := a.Process.Signal(terminate); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the rules are removed", func() bool { return !v.captured() })
	end, err := os.OpenFile(snapshot, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	end.Close()
	wait.For(t, "the agent has ended", a.ended)
}
