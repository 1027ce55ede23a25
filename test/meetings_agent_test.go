package test

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestSupervisedReturns changes things while an agent hangs, and then kills it:
// nameservers, the search list, the capture switch and IPv6. The next agent, which has only
// the table of the snapshot, uses the current state.
func TestSupervisedReturns(t *testing.T) { // K15, C7, F5, F12, F13, F14, K9
	t.Parallel()
	v := newVM(t, "nft")
	v.pushSuffixes()
	knows(v.named, namedIP, "60")
	knows(v.other, otherIP, "60")
	v.resolvConf = v.write("resolv.conf", strings.Replace(suffixConf("", other), "corp.example", "lab.example", 1))
	path := v.write("mesh", meshConfig(true))
	a := v.supervised(append(suffixFlags(), "--capture", "--mesh-config", path)...)
	wait.Until(t, "DNS is captured", func() bool { return v.metric("nametap_capture_on") == 1 })
	v.suffixesOfSnapshot(a)
	for _, on := range []bool{false, true} {
		a.returns(func() { v.replace("mesh", meshConfig(on)) })
		wait.Until(t, "the switch is followed", func() bool { return v.captured() == on })
		v.becomes(named, map[bool]string{true: meshIP, false: "NXDOMAIN"}[on])
	}
	a.returns(func() { v.switchIPv6(false) })
	wait.Until(t, "the agent checks the rules", func() bool { return v.metric("nametap_capture_on") == 1 })
	v.suffixes(named, namedIP)
	a.returns(func() { v.switchIPv6(true) })
	wait.Until(t, "IPv6 is captured", func() bool { return v.dig("@"+named6, "db.secret.example") == dbIP })
	a.end(terminate)
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
}

// suffixesOfSnapshot ends the control plane, changes resolv.conf while the agent hangs, and
// queries the next agent.
func (v *vm) suffixesOfSnapshot(a *agent) {
	v.tb.Helper()
	v.xds.Stop()
	a.returns(func() { v.replace("resolv.conf", suffixConf("", named)) })
	wait.Until(v.tb, "the agent checks the rules", func() bool { return v.metric("nametap_capture_on") == 1 })
	v.suffixes(named, namedIP)
	v.suffixes(other, otherIP)
}

// returns makes a supervised agent hang while it calls meanwhile, kills the agent, and waits
// until the next one is ready.
func (a *agent) returns(meanwhile func()) {
	h := a.host
	h.tb.Helper()
	pid := a.signalChild(syscall.SIGSTOP)
	meanwhile()
	_ = syscall.Kill(pid, syscall.SIGKILL) // the supervisor may have killed it already
	wait.Until(h.tb, "the next agent is ready", func() bool {
		next := child(a.Process.Pid)
		return next != pid && next != 0 && strings.HasPrefix(h.get("/healthz/ready"), "HTTP/1.0 200")
	})
}

// TestServersWhileSwitchedOff changes resolv.conf while capture is off and while rules are
// being removed. Rules for the new nameservers are installed when capture is on again, and
// not before.
func TestServersWhileSwitchedOff(t *testing.T) { // F5, K6, R7
	t.Parallel()
	v := newVM(t, "nft")
	path := v.write("mesh", meshConfig(false))
	a := v.start("--capture", "--capture-servers", "resolv-conf", "--mesh-config", path)
	turn := func(on bool) { v.replace("mesh", meshConfig(on)) }
	serve := func(server string) { v.replace("resolv.conf", "nameserver "+server+"\n") }
	changes := func() int { return a.log.Count("resolv.conf has changed") }
	serve(other)
	wait.Until(t, "the agent knows the change", func() bool { return changes() == 1 })
	if v.captured() {
		t.Error("captured while the switch is off")
	}
	turn(true)
	wait.Until(t, "DNS is captured", v.captured)
	v.becomes(other, meshIP)
	v.asked(named, namedIP)
	turn(false)
	wait.Until(t, "the removal of the rules has begun", func() bool { return !v.captured() })
	serve(named)
	wait.Until(t, "the agent knows the change", func() bool { return changes() == 2 })
	wait.Until(t, "the rules are removed", func() bool { return !strings.Contains(v.Rules(), "NAMETAP") })
	v.asked(named, namedIP)
	turn(true)
	wait.Until(t, "DNS is captured", v.captured)
	v.becomes(named, meshIP)
	v.asked(other, otherIP)
}

// TestSwitchWithConnections checks that switching capture keeps the agent's connections to
// nameservers and those of applications, over both families.
func TestSwitchWithConnections(t *testing.T) { // F15, K2, K5, R7
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		path := v.write("mesh", meshConfig(false))
		v.resolvConf = v.write("resolv.conf", "nameserver "+named+"\nnameserver "+named6+"\noptions use-vc\n")
		v.start("--capture", "--mesh-config", path)
		l := v.load()
		v.more(l, namedIP)
		for range 2 {
			v.replace("mesh", meshConfig(true))
			wait.Until(t, "DNS is captured", v.captured)
			v.more(l, meshIP)
			v.replace("mesh", meshConfig(false))
			wait.Until(t, "DNS is not captured", func() bool { return !v.captured() })
			v.more(l, namedIP)
		}
		v.noneLost(l)
		overTCP := 0
		for _, q := range v.named.Queries() {
			if q.Network == "tcp" {
				overTCP++
			}
		}
		if overTCP == 0 {
			t.Error("no query was sent over TCP")
		}
	})
}

// TestSwitchWhileDraining switches capture while the agent drains, and checks that the
// rules are removed when it has ended.
func TestSwitchWhileDraining(t *testing.T) { // K9, R1, R7
	t.Parallel()
	for name, turns := range map[string][]bool{"off": {false}, "off and on": {false, true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			path := v.write("mesh", meshConfig(true))
			a := v.capture("--mesh-config", path, "--drain", "1h")
			v.asked(named, meshIP)
			if err := a.Process.Signal(terminate); err != nil {
				t.Fatal(err)
			}
			for _, on := range turns {
				v.replace("mesh", meshConfig(on))
			}
			wait.Until(t, "the agent drains", func() bool { return a.log.Count("draining") > 0 })
			wait.Until(t, "the rules are removed", func() bool { return !strings.Contains(v.Rules(), "NAMETAP") })
			if err := a.Process.Signal(terminate); err != nil {
				t.Fatal(err)
			}
			wait.For(t, "the agent ends", a.ended)
			if code := a.ProcessState.ExitCode(); code != 0 || strings.Contains(v.Rules(), "NAMETAP") {
				t.Errorf("exit code %d, and the rules\n%s", code, v.Rules())
			}
			v.asked(named, namedIP)
		})
	}
}

// TestPushWhileDraining checks that names of each kind are answered while the agent drains,
// also from the cache. A push during the drain is in use at once, and the next agent starts
// with it.
func TestPushWhileDraining(t *testing.T) { // C7, R1, F8, F12, F13
	t.Parallel()
	h := newHost(t)
	h.resolvConf = h.write("resolv.conf", suffixConf("", named))
	knows(h.named, namedIP, "60")
	flags := append(suffixFlags(), "--state-dir", h.agentDir("state"))
	a := h.start(append(slices.Clone(flags), "--drain", "1h")...)
	ask := func(name, want string) {
		t.Helper()
		if got := h.dig("-p", "15053", "@127.0.0.1", name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	ask("www.example.org", namedIP)
	if err := a.Process.Signal(terminate); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the agent drains", func() bool { return a.log.Count("draining") > 0 })
	const later = "10.1.0.9"
	version := h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		mesh: {Ips: []string{later}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}})
	if _, err := h.xds.WaitAnswer(t.Context(), version); err != nil {
		t.Fatal(err)
	}
	ask(mesh, later)
	ask("web.corp.example", later)
	ask("www.example.org", namedIP)
	ask("intra.corp.example", namedIP)
	ask("api.open.example", namedIP)
	ask("none.secret.example", "NXDOMAIN")
	asked := 0
	for _, q := range h.named.Queries() {
		if q.Name == "www.example.org." {
			asked++
		}
	}
	if asked != 1 {
		t.Errorf("the nameserver received %d queries for cached names", asked)
	}
	a.end(terminate)
	h.xds.Stop()
	h.start(flags...)
	ask(mesh, later)
}
