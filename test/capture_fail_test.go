package test

import (
	"net"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestRemoveDespiteSettings checks that wrong settings do not prevent the removal of the
// rules: they may be the reason why the agent does not run.
func TestRemoveDespiteSettings(t *testing.T) { // K3, K9
	t.Parallel()
	v := newVM(t, "nft")
	for _, wrong := range [][]string{
		{"NAMETAP_EXCLUDE_CDIR=10.0.0.0/8"},
		{"DNS_PROXY_ADDR=192.0.2.1:15053"},
		{"NAMETAP_LOG_LEVEL=loud"},
		{"PROXY_CONFIG={"},
		{"NAMETAP_MESH_CONFIG=" + v.write("mesh", broken)},
		{"NAMETAP_CAPTURE_SERVERS=resolv-conf", "NAMETAP_RESOLV_CONF=" + v.write("nobody", "")},
	} {
		if r := v.root(v.args("apply")...); r.code != 0 {
			t.Fatalf("apply: %+v", r)
		}
		kept := v.environment
		v.environment = append(v.environment, wrong...)
		v.environment = append(v.environment, "NAMETAP_CAPTURE_FAIL_OPEN=false")
		if r := v.root("capture", "remove", "--after-agent"); r.code != 0 || !v.captured() {
			t.Errorf("%s, with fail-open=false: %+v", wrong, r)
		}
		v.environment = append(kept, wrong...)
		if r := v.root("capture", "remove", "--after-agent"); r.code != 0 || v.captured() {
			t.Errorf("%s: %+v", wrong, r)
		}
		v.environment = kept
	}
}

// TestFailClosed checks that with --capture-fail-open=false no query reaches a nameserver
// after the end of an agent.
func TestFailClosed(t *testing.T) { // K9
	t.Parallel()
	v := newVM(t, "nft")
	path := v.write("mesh", meshConfig(true))
	a := v.capture("--capture-fail-open=false", "--mesh-config", path)
	a.end(terminate)
	if err := v.refused(named); err == nil || !v.captured() {
		t.Errorf("after the end of the agent: %v\n%s", err, v.Rules())
	}
	a = v.capture("--capture-fail-open=false", "--mesh-config", path)
	v.asked(named, meshIP)
	v.replace("mesh", meshConfig(false)) // the switch removes them all the same
	wait.Until(t, "the rules are removed", func() bool { return !v.captured() })
	a.end(terminate)
	v.asked(named, namedIP)
}

// silence lets all queries to listeners over UDP time out, or with -D no longer.
func (v *vm) silence(change string) {
	for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
		v.Exec(tool, "-w", change, "INPUT", "-p", "udp", "--dport", "15053", "-j", "DROP")
	}
}

// TestEndBeforeListeners checks that an agent that ends while it waits for its listeners does not
// report them as failed.
func TestEndBeforeListeners(t *testing.T) { // K9
	t.Parallel()
	v := newVM(t, "nft")
	v.silence("-A")
	a := v.launch("--capture")
	wait.Until(t, "the listeners are probed", func() bool { return a.log.Count("DNS is not captured yet") > 0 })
	a.end(terminate)
	canceled := a.log.Count("canceled") - a.log.Count("i/o timeout", "canceled") // of two listeners, one may have been silent until then
	if a.ProcessState.ExitCode() != 0 || canceled != 0 || v.captured() {
		t.Errorf("%v\n%s", a.ProcessState, a.log)
	}
}

// TestSystemd checks that the agent reports to systemd when DNS works, and answers the
// watchdog, also while clients hold all TCP connections.
func TestSystemd(t *testing.T) { // R2, V3
	t.Parallel()
	v := newVM(t, "nft")
	next := v.notifications()
	const conns = 1000
	v.launch("--capture")
	if got := next(); got != "READY=1" || !v.captured() {
		t.Errorf("the first notification is %q", got)
	}
	for range conns + 1 { // the last one waits
		v.Run(func() {
			conn, err := net.Dial("tcp", dnsAddr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
		})
	}
	for range 5 {
		if got := next(); got != "WATCHDOG=1" {
			t.Errorf("a later notification is %q", got)
		}
	}
}

// TestSwitchOffNotPermitted checks that an agent without permission to read rules runs if
// capture is off.
func TestSwitchOffNotPermitted(t *testing.T) { // K9
	t.Parallel()
	v := newVM(t, "auto")
	v.capabilities = nil
	v.environment = append(v.environment, "ISTIO_META_DNS_CAPTURE=false")
	a := v.start("--capture")
	const warning = "capture rules of an earlier agent may remain"
	wait.Until(t, "the log reports it", func() bool { return a.log.Count(warning) > 0 })
	if v.metric("nametap_capture_on") != 0 {
		t.Error("the metric reports that DNS is captured")
	}
	a.end(terminate)
	if a.ProcessState.ExitCode() != 0 || a.log.Count(warning) != 1 || a.log.Count("level=ERROR") != 0 {
		t.Errorf("%v\n%s", a.ProcessState, a.log)
	}
}
