package test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestCaptureUnanswered checks that `capture status` and `capture check` fail, and say what to do, if rules
// are installed and no agent answers where they redirect queries: after its death without a guard, and while
// another program has one of its ports.
func TestCaptureUnanswered(t *testing.T) { // K21
	t.Parallel()
	v := newVM(t, "nft")
	says := func(code int, parts ...string) { // at last, on a busy machine
		t.Helper()
		for _, subcommand := range []string{"status", "check"} {
			wait.Until(t, fmt.Sprintf("capture %s exits with %d and says %q", subcommand, code, parts), func() bool {
				r := v.nametap(v.args(subcommand)...)
				missing := func(part string) bool { return !strings.Contains(r.stdout+r.stderr, part) }
				failed := strings.Contains(r.stderr, "no agent answers where the rules redirect queries")
				return r.code == code && failed == (code != 0) && !slices.ContainsFunc(parts, missing)
			})
		}
	}
	a := v.capture()
	says(0, "IPv4", "IPv6")
	a.end(syscall.SIGKILL)
	says(1, "(udp 127.0.0.1:15053, tcp 127.0.0.1:15053, udp [::1]:15053, tcp [::1]:15053)",
		"connection refused", "systemctl restart nametap", "nametap capture remove")
	release := v.take("tcp", "[::1]:15053")
	v.start()
	says(1, "(tcp [::1]:15053)")
	release()
	wait.Until(t, "the agent has all listeners", func() bool { return v.nametap(v.args("status")...).code == 0 })
	says(0)
}

// TestCheckPort checks that `capture check` says if another program has the port of the agent.
func TestCheckPort(t *testing.T) { // K21
	t.Parallel()
	v := newVM(t, "nft")
	if r := v.nametap(v.args("check")...); r.code != 0 || strings.Contains(r.stdout, "15053") {
		t.Errorf("%+v", r)
	}
	nameserver(t, v.NS, "127.0.0.1", namedIP) // on port 53
	if r := v.nametap(v.args("check", "--dns-addr", "127.0.0.1:15053")...); r.code != 0 {
		t.Errorf("%+v", r)
	}
	v.take("udp", dnsAddr)
	r := v.nametap(v.args("check")...)
	for _, part := range []string{"MISSING  agent at udp 127.0.0.1:15053", "ztunnel's DNS proxy", "--dns-addr"} {
		if r.code != 1 || !strings.Contains(r.stdout, part) || !strings.Contains(r.stderr, "nothing can be captured: agent at udp 127.0.0.1:15053") {
			t.Errorf("%q is not in %+v", part, r)
		}
	}
}
