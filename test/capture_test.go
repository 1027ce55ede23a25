package test

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/netns"
)

// captured reports whether rules of ours are in.
func (h *host) captured() bool {
	h.tb.Helper()
	return strings.Contains(h.Exec("iptables-save")+h.Exec("ip6tables-save"), "-j NAMETAP_OUTPUT")
}

// The agent on a VM: rules come when the listeners answer, and go when it ends.
func TestAgentCaptures(t *testing.T) { // K1, K9, R1
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	h := newHost(t)
	before := h.Exec("iptables-save")
	a := h.start("--capture")
	h.until("the rules are in", h.captured)
	for _, over := range []string{"+notcp", "+tcp"} {
		for name, want := range map[string]string{"web.shop.svc.cluster.local": "10.1.0.1", "www.example.org": "192.0.2.53"} {
			if got := h.dig(over, "@"+named, name); got != want {
				t.Errorf("dig %s %s: %s, want %s", over, name, got, want)
			}
		}
	}
	a.end(terminate)
	if h.captured() {
		t.Errorf("rules are left:\n%s", h.Exec("iptables-save"))
	}
	if after := h.Exec("iptables-save"); withoutComments(after) != withoutComments(before) {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
	if got := h.dig("@"+named, "web.shop.svc.cluster.local"); got != "192.0.2.53" {
		t.Errorf("without the agent: %s", got)
	}
}

// withoutComments leaves out the lines with the time of a save.
func withoutComments(save string) string {
	var kept []string
	for line := range strings.Lines(save) {
		if !strings.HasPrefix(line, "#") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// An agent that is killed leaves a host whose DNS works, once its service manager has
// run what it runs after the end; without it, and with --fail-open=false, queries are
// refused at once.
func TestAgentKilled(t *testing.T) { // K9, K12
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	h := newHost(t)
	for _, failOpen := range []string{"true", "false"} {
		a := h.start("--capture", "--fail-open="+failOpen)
		h.until("the rules are in", h.captured)
		a.end(syscall.SIGKILL)
		began := time.Now()
		if output := h.Exec("sh", "-c", "dig +tries=1 +timeout=5 @"+named+" www.example.org; true"); !strings.Contains(output, "connection refused") {
			t.Errorf("dig:\n%s", output)
		}
		t.Logf("refused after %v, dig's start and end included", time.Since(began))
		began = time.Now()
		h.Exec(binary, "capture", "remove", "--after-agent", "--fail-open="+failOpen)
		if open := !h.captured(); open != (failOpen == "true") {
			t.Fatalf("--fail-open=%s: open is %v", failOpen, open)
		}
		t.Logf("--fail-open=%s: removed after %v", failOpen, time.Since(began))
	}
	h.Exec(binary, "capture", "remove")
	if got := h.dig("@"+named, "web.shop.svc.cluster.local"); got != "192.0.2.53" {
		t.Errorf("without rules: %s", got)
	}
}
