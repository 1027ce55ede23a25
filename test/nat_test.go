package test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestForgottenConnection drops the packets of a connection in both directions, like a
// middlebox that has forgotten it. The agent replaces the connection.
func TestForgottenConnection(t *testing.T) { // F15
	t.Parallel()
	netns.Need(t, "ss")
	v := newVM(t, "nft")
	v.resolvConf = v.write("resolv.conf", "nameserver "+named+"\noptions use-vc\n")
	v.start("--upstream-timeout", "4s")
	ask := func(name string) {
		t.Helper()
		if got := v.dig("@127.0.0.1", "-p", "15053", name); got != namedIP {
			t.Errorf("%s: %s", name, got)
		}
	}
	connection := func() string { // the agent's port
		for line := range strings.Lines(v.Exec("ss", "-Htn", "state", "established", "dst", named+":53")) {
			_, port, _ := strings.Cut(strings.Fields(line)[2], ":")
			return port
		}
		return ""
	}
	for round := range 2 {
		ask(fmt.Sprintf("first%d.example.org", round))
		port := connection()
		if port == "" {
			t.Fatal("no connection")
		}
		v.net.Exec("iptables-nft", "-w", "-I", "INPUT", "-p", "tcp", "--sport", port, "-j", "DROP")
		v.net.Exec("iptables-nft", "-w", "-I", "OUTPUT", "-p", "tcp", "--dport", port, "-j", "DROP")
		for n := range 10 {
			ask(fmt.Sprintf("next%d.%d.example.org", n, round))
		}
		wait.Until(t, "the connection is replaced", func() bool { return connection() != port })
	}
	if n := v.named.Connections(); n > 6 {
		t.Errorf("%d connections", n)
	}
}
