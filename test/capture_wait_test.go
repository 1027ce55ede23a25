package test

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A waiting is a `capture apply` that runs as root and waits for the agent.
type waiting struct {
	log   *testlog.Buffer
	ended chan result
}

// apply starts `capture apply --capture-wait 1h` without waiting for it.
func (v *vm) apply() *waiting {
	v.tb.Helper()
	w := &waiting{log: testlog.New(v.tb), ended: make(chan result, 1)}
	cmd := v.command(v.args("apply", "--capture-wait", "1h", "--status-addr", statusAddr)...)
	cmd.SysProcAttr = nil
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, w.log
	if err := v.Start(cmd); err != nil {
		v.tb.Fatal(err)
	}
	v.tb.Cleanup(func() { _ = cmd.Process.Kill() })
	go func() {
		_ = cmd.Wait() // the exit code is in the result
		w.ended <- result{stdout.String(), w.log.String(), cmd.ProcessState.ExitCode()}
	}()
	return w
}

// applied waits until the command has ended, and fails the test unless the rules are installed.
func (v *vm) applied(w *waiting) {
	v.tb.Helper()
	if r := wait.For(v.tb, "capture apply ends", w.ended); r.code != 0 || !v.captured() {
		v.tb.Errorf("%+v", r)
	}
}

// TestApplyWaits checks that `capture apply --capture-wait` installs no rules before the agent
// answers, and that the first captured queries are answered from the table.
func TestApplyWaits(t *testing.T) { // I0
	t.Parallel()
	for _, flags := range [][]string{nil, {"--supervise"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			v.capabilities = nil
			w := v.apply()
			wait.Until(t, "the command waits", func() bool { return w.log.Count("waiting for the agent") == 1 })
			if v.captured() {
				t.Error("captured without an agent")
			}
			v.asked(named, namedIP)
			v.launch(flags...)
			v.applied(w)
			for _, server := range []string{named, named6} {
				v.asked(server, meshIP)
			}
			if w.log.Count("the agent is ready") != 1 {
				t.Errorf("%s", w.log)
			}
		})
	}
}

// TestApplyWaitsForTable checks that the rules are installed when the agent has a table, or in a pod
// after 3 s without one.
func TestApplyWaitsForTable(t *testing.T) { // I0, R2
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	v.environment = append(v.environment, "KUBERNETES_SERVICE_HOST=10.96.0.1")
	v.xds.Stop()
	v.launch()
	w := v.apply()
	v.applied(w)
	if w.log.Count("waiting for the table") != 1 || w.log.Count("no table of mesh hosts") != 1 {
		t.Errorf("%s", w.log)
	}
	v.digs(namedIP, "@"+named, "www.example.org")
}

// TestApplyGivesUp checks that without an agent the command ends with an error that says where to
// look, and that a missing capability is reported before the wait.
func TestApplyGivesUp(t *testing.T) { // I0
	t.Parallel()
	v := newVM(t, "nft")
	r := v.root(v.args("apply", "--capture-wait", "2s", "--dns-addr", "localhost:15053")...)
	for _, part := range []string{
		"no agent has answered for 2s (--capture-wait)", "the log of the container that runs `nametap agent`", "--dns-addr",
		"udp 127.0.0.1:15053: ", "connection refused",
	} {
		if r.code != 1 || !strings.Contains(r.stderr, part) || v.captured() {
			t.Errorf("%q is not in %+v", part, r)
		}
	}
	v.capabilities = nil
	if r := v.nametap(v.args("apply", "--capture-wait", "1h")...); r.code != 1 || !strings.HasPrefix(r.stderr, "nametap capture apply: CAP_NET_ADMIN is missing") {
		t.Errorf("%+v", r)
	}
	v.start()
	r = v.root(v.args("apply", "--capture-wait", "1h", "--status-addr", "127.0.0.1:1")...)
	if r.code != 0 || !v.captured() || !strings.Contains(r.stderr, "both containers need the same --status-addr") {
		t.Errorf("with a wrong status address: %+v", r)
	}
}

// TestApplyBesideOtherServer checks that `capture apply --capture-wait` does not take another DNS
// server with the agent's port for the agent, such as Istio's agent in a sidecar that starts first.
func TestApplyBesideOtherServer(t *testing.T) { // I0
	t.Parallel()
	v := newVM(t, "nft")
	v.Run(func() {
		fakedns.Start(t, anyName(otherIP), fakedns.On(netip.MustParseAddrPort("127.0.0.1:15053")))
	})
	r := v.root(v.args("apply", "--capture-wait", "2s", "--status-addr", statusAddr)...)
	for _, part := range []string{"no rules are installed, because no agent has answered", "udp 127.0.0.1:15053: another DNS server answers"} {
		if r.code != 1 || !strings.Contains(r.stderr, part) || v.captured() {
			t.Errorf("%q is not in %+v", part, r)
		}
	}
}

// TestApplyForOtherUser checks that `capture apply --capture-wait` installs no rules that would
// redirect the agent's own queries to it, as in a container that runs as another user.
func TestApplyForOtherUser(t *testing.T) { // I0
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	v.start()
	others := []string{"--capture-agent-uid", "4242", "--capture-agent-gid", "4242"}
	r := v.root(v.args("apply", append(others, "--capture-wait", "1h", "--status-addr", statusAddr)...)...)
	for _, part := range []string{"no rules are installed, because", "uid 1337 and gid 1337", "--capture-agent-uid [4242]"} {
		if r.code != 1 || !strings.Contains(r.stderr, part) || v.captured() {
			t.Errorf("%q is not in %+v", part, r)
		}
	}
	w := v.apply()
	v.applied(w)
	v.asked(named, meshIP)
}

// TestRulesForOtherUser checks that the agent says so if the rules redirect its own queries, and
// uses its nameservers again when they do not.
func TestRulesForOtherUser(t *testing.T) { // F6
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities, v.flags = nil, append(v.flags, "--upstream-timeout", "2s") // in which its queries come back often
	a := v.start()
	if r := v.root(v.args("apply", "--capture-agent-uid", "4242", "--capture-agent-gid", "4242")...); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	wait.Until(t, "the agent names the reason", func() bool {
		v.digSoon("@"+named, "www.example.org") // it fails
		return a.log.Count("the capture rules redirect the agent's own queries") == 1
	})
	if text := v.nametap("status", "--status-addr", statusAddr).stdout; !strings.Contains(text, "looping") || !strings.Contains(text, "--capture-agent-uid") {
		t.Errorf("status: %s", text)
	}
	if r := v.root(v.args("apply")...); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	wait.Until(t, "the nameserver is used again", func() bool { return v.digSoon("@"+named, "www2.example.org") == namedIP })
}

// TestApplyWaitsForFamilies checks that the family is not captured after the wait whose port another program has.
func TestApplyWaitsForFamilies(t *testing.T) { // I0, K17
	t.Parallel()
	v := newVM(t, "nft")
	v.capabilities = nil
	v.take("udp", "[::1]:15053")
	v.start()
	w := v.apply()
	v.applied(w)
	v.asked(named, meshIP)
	v.asked(named6, namedIP)
	if w.log.Count("DNS over one family is not captured: the agent does not answer over it") != 1 {
		t.Errorf("%s", w.log)
	}
}

// TestLiveByListeners checks that /healthz/live fails while no UDP listener answers.
func TestLiveByListeners(t *testing.T) { // R2
	t.Parallel()
	v := newVM(t, "nft")
	v.start()
	live := func(status string) func() bool {
		return func() bool { return strings.HasPrefix(v.get("/healthz/live"), "HTTP/1.0 "+status) }
	}
	wait.Until(t, "the agent is live", live("200"))
	v.silence("-A")
	wait.Until(t, "the agent is not live", live("503"))
	if got := v.get("/healthz/live"); !strings.Contains(got, "no DNS listener answers") {
		t.Error(got)
	}
	v.silence("-D")
	wait.Until(t, "the agent is live again", live("200"))
}
