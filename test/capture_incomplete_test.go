package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestCaptureIncomplete checks that apply exits 1 if a supported family is not captured,
// and that the agent retries.
func TestCaptureIncomplete(t *testing.T) { // K13
	t.Parallel()
	v := newVM(t, "nft")
	repair := v.breakTool("ip6tables-" + v.backend + "-restore")
	r := v.root(v.args("apply")...)
	if r.code != 1 || !strings.Contains(r.stderr, "capture is incomplete") || !strings.Contains(r.stderr, "IPv6") || !strings.Contains(r.stdout, "IPv4      in place") {
		t.Errorf("apply: %+v", r)
	}
	a := v.capture()
	level := func(family, level string) bool {
		return strings.Contains(v.get("/metrics"), `nametap_capture_level{family="`+family+`",level="`+level+`"} 1`)
	}
	if !level("IPv4", "complete") || !level("IPv6", "failed") {
		t.Errorf("levels:\n%s", v.get("/metrics"))
	}
	if r := v.nametap("status", "--status-addr", statusAddr); !strings.Contains(r.stdout, "Resource temporarily unavailable") {
		t.Errorf("status: %+v", r)
	}
	repair()
	wait.Until(t, "IPv6 is captured", func() bool { return level("IPv6", "complete") })
	v.becomes(named6, meshIP)
	if a.log.Count("capture is incomplete; retrying", "capturing DNS over IPv6") != 1 {
		t.Errorf("%s", a.log)
	}
	if r := v.root(v.args("apply")...); r.code != 0 {
		t.Errorf("apply: %+v", r)
	}
}
