package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestRemoveUnread checks that rules that cannot be read do not count as removed: the agent
// removes them once it can read them, and until then status and log report them.
func TestRemoveUnread(t *testing.T) { // K3, K9, K13
	t.Parallel()
	v := newVM(t, "nft")
	repair := v.breakTool("iptables-nft-save")
	repair()
	path := v.write("mesh", meshConfig(true))
	a := v.capture("--mesh-config", path)
	v.write("broken", "")
	v.replace("mesh", meshConfig(false))
	const failure = "the capture rules cannot be removed; retrying"
	wait.Until(t, "the log reports it", func() bool { return a.log.Count(failure) > 0 })
	if a.log.Count("rules of this agent are removed") != 0 || !v.captured() {
		t.Errorf("rules:\n%s\n%s", v.Rules(), a.log)
	}
	if r := v.nametap("status", "--status-addr", statusAddr); !strings.Contains(r.stdout, "rules cannot be removed") {
		t.Errorf("status: %+v", r)
	}
	v.asked(named, namedIP) // the lease of the rules has ended
	if v.metric("nametap_capture_on") != 0 {
		t.Error("the metric reports that queries are captured")
	}
	repair()
	wait.Until(t, "the rules are removed", func() bool { return !v.captured() })
	wait.Until(t, "nothing is captured", func() bool { return v.metric("nametap_capture_on") == 0 })
}

// TestEndUnread checks that an agent exits 1 if it cannot verify at its end that its rules
// are removed.
func TestEndUnread(t *testing.T) { // K3, K9, K13
	t.Parallel()
	v := newVM(t, "nft")
	repair := v.breakTool("iptables-nft-save")
	repair()
	a := v.capture()
	v.write("broken", "")
	_ = a.Process.Signal(terminate)
	<-a.ended
	if code := a.ProcessState.ExitCode(); code != 1 || a.log.Count("removing the capture rules") != 1 {
		t.Errorf("exit code %d\n%s", code, a.log)
	}
	repair()
	if r := v.root("capture", "remove"); r.code != 0 || v.captured() {
		t.Errorf("%+v\n%s", r, v.Rules())
	}
}
