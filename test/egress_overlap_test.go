package test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// fetch sends a request of HTTP/1.1 for a host to a VIP and returns the body, or the error.
func (e *egressVM) fetch(vip, host string) string {
	conn, err := e.dialTCP(vip, "80")
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host); err != nil {
		return err.Error()
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	return string(body)
}

// E2: of several hosts with one VIP, a name belongs to the host itself, else to the wildcard with the longest
// suffix.
func TestEgressOverlap(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	hosts := map[string]*api.NameTable_NameInfo{}
	for port, host := range map[uint32]string{8001: "*.example.org", 8002: "*.z.example.org", 8003: "*.a.z.example.org", 8004: "one.z.example.org"} {
		hosts[host] = externalHost([]*api.NameTable_Destination{{Port: 80, Target: port}}, vipWild)
		e.web(fmt.Sprintf("%s:%d", serverA, port), host, false)
	}
	want := map[string]string{
		"x.example.org": "*.example.org", "z.example.org": "*.example.org", "x.z.example.org": "*.z.example.org",
		"a.z.example.org": "*.z.example.org", "x.a.z.example.org": "*.a.z.example.org", "y.x.a.z.example.org": "*.a.z.example.org",
		"one.z.example.org": "one.z.example.org", "x.one.z.example.org": "*.z.example.org",
	}
	for name := range want {
		e.resolve(name, serverA)
	}
	e.xds.Push(&api.NameTable{Table: hosts})
	e.capture()
	wait.Until(t, "the agent has the table", func() bool { return strings.Contains(e.get("/debug/ndsz"), "one.z.example.org") })
	for name, host := range want {
		if got := e.fetch(vipWild, name); !strings.HasPrefix(got, host+" ") {
			t.Errorf("%s leads to %q, want %s", name, got, host)
		}
	}
	status := e.root("status", "--status-addr", statusAddr).stdout
	if line := "x.z.example.org of *.z.example.org: "; !strings.Contains(status, line) {
		t.Errorf("want %q in the status:\n%s", line, status)
	}

	// A name that becomes a host of its own is shown as one.
	hosts["x.z.example.org"] = externalHost(nil, vipA)
	e.xds.Push(&api.NameTable{Table: hosts})
	e.web(serverA+":80", "x.z.example.org", false)
	wait.Until(t, "the name has a VIP of its own", func() bool { return strings.HasPrefix(e.fetch(vipA, "x.z.example.org"), "x.z.example.org ") })
	status = e.root("status", "--status-addr", statusAddr).stdout
	if line := "x.z.example.org: " + vipA + ":80 to "; !strings.Contains(status, line) {
		t.Errorf("want %q in the status:\n%s", line, status)
	}
}
