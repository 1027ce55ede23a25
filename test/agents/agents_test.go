// Package agents connects many agents to nametap-discovery at once, and measures what they cost it.
package agents

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/fleet"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// docs/performance.md has the flags for its figures.
var (
	agents = flag.Int("agents.number", 300, "agents")
	hosts  = flag.Int("agents.hosts", 500, "Services")
	edits  = flag.Int("agents.edits", 3, "edits of a Service, one after the other")
)

// D34: agents that all connect at once are served, get a change, and get what they lack when all connect again. The log has
// what that costs the server.
func TestAgentsConnectAtOnce(t *testing.T) {
	api := fakekube.Start(t)
	for i := range *hosts {
		put(api, i, 0)
	}
	addr, config, command := server(t, api)
	pid := command.Process.Pid
	each := func(d time.Duration) string {
		return fmt.Sprintf("%.1f µs each", float64(d)/float64(time.Microsecond)/float64(*agents))
	}

	empty, used, began := anonymous(t, pid), processor(t, pid), time.Now()
	f := fleet.Start(t, fleet.Config{Addr: addr, Agents: *agents, Namespace: "shop", TLS: config, Named: true})
	t.Logf("all have their tables after %v: processor %s", time.Since(began), each(processor(t, pid)-used))
	var took []time.Duration
	used, bytes := processor(t, pid), f.Read()
	for i := range *edits {
		took = append(took, f.Change(t, func() { put(api, i%*hosts, i+1) })...)
	}
	slices.Sort(took)
	n := len(took)
	t.Logf("a Service changes: processor %s, %d bytes each; arrives after %v (p50) and %v (p99)",
		each((processor(t, pid)-used)/time.Duration(*edits)), (f.Read()-bytes)/int64(n), took[n/2], took[n*99/100])
	f.AwaitSame(t)
	t.Logf("memory %d KiB each", (anonymous(t, pid)-empty)/1024 / *agents)

	f.Stop()
	put(api, 0, *edits+1)
	used, bytes, began = processor(t, pid), f.Read(), time.Now()
	f.Connect(t)
	t.Logf("all connect again, one Service has changed: after %v, processor %s, %d bytes each", time.Since(began), each(processor(t, pid)-used), (f.Read()-bytes)/int64(*agents))
	f.AwaitSame(t)
}

// put puts a Service, which has another address in each version.
func put(api *fakekube.API, i, version int) {
	api.Put(fakekube.Services, fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: web-%d, namespace: shop}\n"+
		"spec: {clusterIP: 10.%d.%d.%d, ports: [{name: http, port: 80}]}\n", i, 100+i>>16*50+version%50, i>>8&255, i&255))
}

// server starts nametap-discovery, and returns its address and what agents need for TLS.
func server(t *testing.T, api *fakekube.API) (addr string, config *tls.Config, command *exec.Cmd) {
	t.Helper()
	built, err := process.Build("nametap-discovery")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(built) })
	addr, status := free(t), free(t)
	flags, config := certificates(t)
	command = exec.CommandContext(t.Context(), filepath.Join(built, "nametap-discovery"), append(flags,
		"--kubeconfig="+api.Kubeconfig(), "--state-dir=", "--http-addr="+status, "--grpc-addr=", "--tls-addr="+addr,
		"--max-clients=1000000", "--max-clients-per-address=1000000")...) // all agents have one address
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Wait() }) // the end of the test's context has killed it
	wait.Until(t, "nametap-discovery is ready", func() bool {
		response, err := http.Get("http://" + status + "/healthz/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return addr, config, command
}

// certificates returns the flags of a server with TLS, and the configuration of its clients.
func certificates(t *testing.T) (flags []string, config *tls.Config) {
	t.Helper()
	const name = "nametap-discovery"
	authority := fakexds.NewAuthority(t, name, "spiffe://cluster.local/ns/shop/sa/default")
	certificate, key := authority.Server()
	dir := t.TempDir()
	for flag, text := range map[string]string{"--tls-cert": certificate, "--tls-key": key, "--tls-client-ca": authority.Root()} {
		path := filepath.Join(dir, strings.TrimPrefix(flag, "--"))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		flags = append(flags, flag+"="+path)
	}
	certificate, key = authority.Client()
	pair, err := tls.X509KeyPair([]byte(certificate), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(authority.Root()))
	return flags, &tls.Config{ServerName: name, RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

// free returns an address with a free port.
func free(t *testing.T) string {
	t.Helper()
	server := httptest.NewServer(nil)
	defer server.Close()
	return server.Listener.Addr().String()
}

// processor returns the processor time of a process, in ticks of 10 ms.
func processor(t *testing.T, pid int) time.Duration {
	t.Helper()
	_, rest, _ := strings.Cut(read(t, pid, "stat"), ") ")
	fields := strings.Fields(rest)
	var user, system time.Duration
	if _, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system); err != nil {
		t.Fatal(err)
	}
	return (user + system) * 10 * time.Millisecond
}

// anonymous returns the memory of a process that no file backs, in bytes.
func anonymous(t *testing.T, pid int) (n int) {
	t.Helper()
	_, rest, _ := strings.Cut(read(t, pid, "smaps_rollup"), "\nAnonymous:")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		t.Fatal(err)
	}
	return n << 10
}

func read(t *testing.T, pid int, name string) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
