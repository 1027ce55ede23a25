package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// pushPorts pushes hosts whose ports are known, and one whose are not: exactB.
func (e *egressVM) pushPorts() {
	e.tb.Helper()
	e.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		exactA: externalHost([]*api.NameTable_Destination{
			{Port: 7}, {Port: 80, Target: 8080}, {Port: 25, Endpoints: []string{serverB + ":2525"}},
			{Port: 26, Endpoints: []string{"mx.example.net:2525"}}, {Port: 27, Endpoints: []string{"[" + server6B + "]:2525", serverB + ":2525", "mx.example.net:2525"}},
			{Port: 28, Endpoints: []string{"127.0.0.1:22", "169.254.169.254:80"}}, {Port: 29, Endpoints: []string{"10.0.0.99:1", "lost.example.net:1", serverB + ":2525"}},
		}, vipA, vip6A),
		exactB:   externalHost(nil, vipB, vip6B),
		wildcard: externalHost([]*api.NameTable_Destination{{Port: 443, Target: 8443}, {Port: 80}}, vipWild, vip6Wild),
	}})
	wait.Until(e.tb, "the agent has the ports", func() bool { return strings.Contains(e.get("/debug/ndsz"), "mx.example.net") })
}

// E6, E7: the ports of a host are carried, to their target ports and endpoints, and others are reset.
func TestEgressPorts(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.resolve("mx.example.net", serverB, server6B)
	e.resolve(exactA, serverA)
	e.resolve(exactB, serverB)
	for addr, name := range map[string]string{
		serverA + ":7": "host", serverA + ":22": "other port", serverA + ":8080": "target", serverA + ":80": "not the target",
		serverB + ":2525": "endpoint", "[" + server6B + "]:2525": "endpoint", serverB + ":22": "unknown", serverA + ":25": "not the endpoint",
	} {
		e.net.Serve(addr, greeter(name))
	}
	e.capture()
	e.pushPorts()
	for port, want := range map[string]string{
		"7": "220 host", "80": "220 target", "25": "220 endpoint", "26": "220 endpoint", "27": "220 endpoint", "29": "220 endpoint",
	} {
		for _, vip := range []string{vipA, vip6A} {
			if got := e.greeting(vip, port); got != want {
				t.Errorf("%s port %s: %q, want %q", vip, port, got, want)
			}
		}
	}
	for i, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "22"); !strings.Contains(got, "reset") || e.refusals("port") != float64(i+1) {
			t.Errorf("%s port 22: %q, %v refusals", vip, got, e.refusals("port"))
		}
	}
	if got := e.greeting(vipWild, "22"); !strings.Contains(got, "reset") || e.refusals("port") != 3 {
		t.Errorf("a port of a wildcard: %q, %v refusals, before the client says a name", got, e.refusals("port"))
	}
	if got := e.greeting(vipA, "28"); !strings.Contains(got, "reset") || e.refusals("address") != 1 {
		t.Errorf("endpoints of this host and of metadata: %q, %v refusals", got, e.refusals("address"))
	}
	if got := e.greeting(vipB, "22"); got != "220 unknown" {
		t.Errorf("a host whose ports are not known: %q", got)
	}
	status := e.root("status", "--status-addr", statusAddr).stdout
	for _, line := range strings.Split(status, "\n") {
		if unknown := strings.Contains(line, "ports not known"); strings.Contains(line, exactA+": ") && unknown || strings.Contains(line, exactB+": ") && !unknown {
			t.Errorf("the status says %q", line)
		}
	}
	for _, want := range []string{
		exactB + ": " + vipB + ":22 to ", "wildcard port 22: the host has only the ports 80, 443",
	} {
		want = strings.Replace(want, "wildcard", wildcard, 1)
		if !strings.Contains(status, want) {
			t.Errorf("want %q in:\n%s", want, status)
		}
	}
}

// E6: the connections to a destination with several endpoints are spread over them.
func TestEgressSpread(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":2525", greeter("one"))
	e.net.Serve(serverB+":2525", greeter("two"))
	e.capture()
	e.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		exactA: externalHost([]*api.NameTable_Destination{{Port: 25, Endpoints: []string{serverA + ":2525", serverB + ":2525"}}}, vipA),
	}})
	seen := map[string]int{}
	wait.Until(t, "both endpoints are used", func() bool {
		seen[e.greeting(vipA, "25")]++
		return seen["220 one"] > 0 && seen["220 two"] > 0
	})
}

// E6: nametap-discovery sends the ports and endpoints of a ServiceEntry in a file, and their changes.
func TestEgressWithDiscovery(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.resolve(exactA, serverA)
	e.net.Serve(serverA+":3306", greeter("one"))
	e.net.Serve(serverB+":13306", greeter("two"))
	objects := t.TempDir()
	put := func(ports, endpoints string) {
		text := "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: mysql, namespace: shop}\n" +
			"spec: {hosts: [" + exactA + "], resolution: DNS, ports: [" + ports + "], endpoints: [" + endpoints + "]}\n"
		if err := os.WriteFile(filepath.Join(objects, "new"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(objects, "new"), filepath.Join(objects, "mysql.yaml")); err != nil {
			t.Fatal(err)
		}
	}
	put("{number: 3306, name: sql, protocol: TCP}", "")
	const addr = "127.0.0.1:15010"
	log := testlog.New(t)
	cmd := exec.Command(filepath.Join(planes.Dir(t), "nametap-discovery"), "--config-dir", objects, "--grpc-addr", addr)
	cmd.Stdout, cmd.Stderr = log, log
	if err := e.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // it has nothing to save
	e.capture("--xds-addr", addr)
	vip := e.dig("@10.0.0.55", exactA)
	if !strings.HasPrefix(vip, "240.") {
		t.Fatalf("the VIP is %q", vip)
	}
	if got := e.greeting(vip, "3306"); got != "220 one" {
		t.Errorf("the port of the host: %q", got)
	}
	if got := e.greeting(vip, "13306"); !strings.Contains(got, "reset") || e.refusals("port") != 1 {
		t.Errorf("another port: %q, %v refusals", got, e.refusals("port"))
	}
	put("{number: 3306, name: sql, protocol: TCP}, {number: 53, name: dns, protocol: UDP}", "{address: "+serverB+", ports: {sql: 13306}}")
	wait.Until(t, "the endpoint is used", func() bool { return e.greeting(vip, "3306") == "220 two" })
	put("{number: 3307, name: sql, protocol: TCP, targetPort: 3306}", "")
	wait.Until(t, "the target port is used", func() bool { return e.greeting(vip, "3307") == "220 one" })
	if got := e.greeting(vip, "3306"); !strings.Contains(got, "reset") {
		t.Errorf("the port that was removed: %q", got)
	}
}
