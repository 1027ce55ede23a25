package test

import (
	"io"
	"net"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// E1, R3: connections to VIPs of a family are not redirected to another program that has the port. They are once
// it is free.
func TestEgressPortTaken(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	var other net.Listener
	var err error
	e.Run(func() { other, err = net.Listen("tcp", "[::1]:"+egressPort) })
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := other.Accept(); err == nil {
			accepted <- conn
		}
	}()
	e.net.Exec("ip", "route", "add", "unreachable", vip6A)
	e.capture()
	if got := e.greeting(vipA, "7"); got != "220 one" {
		t.Errorf("IPv4: %q", got)
	}
	if got := e.greeting(vip6A, "7"); !strings.Contains(got, "unreachable") && !strings.Contains(got, "no route") {
		t.Errorf("IPv6: %q, want that the connection leaves the host", got)
	}
	if len(accepted) > 0 {
		t.Error("another program has got the connection")
	}
	if rules := e.Exec("ip6tables-nft-save"); strings.Contains(rules, "2001:2::") || !strings.Contains(rules, "NAMETAP_OUTPUT") {
		t.Errorf("the rules for IPv6 are\n%s", rules)
	}
	if status := e.root("status", "--status-addr", statusAddr).stdout; !strings.Contains(status, ": connections to VIPs: listen tcp6 [::1]:"+egressPort) {
		t.Errorf("the status does not report it:\n%s", status)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "connections over IPv6 are redirected", func() bool { return strings.Contains(e.Exec("ip6tables-nft-save"), "2001:2::") })
}

// E14, R10: settings of egress that change in a file take effect after a restart, in the rules, too.
func TestEgressReload(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":7", greeter("one"))
	e.flags = e.flags[:len(e.flags)-3] // without --egress and --egress-addr
	file := e.write("nametap.yaml", "egress: true\negress-addr: localhost:"+egressPort+"\n")
	a := e.capture("--config", file)
	for i, text := range []string{
		"egress: true\negress-addr: localhost:15077\n",
		"egress: false\negress-addr: localhost:" + egressPort + "\n",
	} {
		e.replace("nametap.yaml", text+"capture-exclude-uid: [7]\n"+strings.Repeat("# another size\n", i))
		wait.Until(t, "the file is read", func() bool { return a.log.Count("takes effect after a restart") > i })
		e.replace("nametap.yaml", text+"capture-exclude-uid: [8]\n")
		wait.Until(t, "the rules are replaced", func() bool { return strings.Contains(e.Rules(), "--uid-owner 8 ") })
		conn := e.mustDial(vipA, "7")
		greeting := make([]byte, len("220 one\n"))
		if _, err := io.ReadFull(conn, greeting); err != nil || string(greeting) != "220 one\n" {
			t.Errorf("%q: %q, %v", text, greeting, err)
		}
		e.replace("nametap.yaml", text+"capture-exclude-uid: [7]\n")
		wait.Until(t, "the rules are replaced", func() bool { return strings.Contains(e.Rules(), "--uid-owner 7 ") })
	}
}
