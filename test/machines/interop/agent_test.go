package interop

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
)

const (
	dnsAddr    = "127.0.0.1:15053"
	statusAddr = "127.0.0.1:15020"

	terminate = syscall.SIGTERM
)

// The programs that TestMain builds.
var binary, discoveryBinary string

func TestMain(m *testing.M) {
	dir, err := process.Build("nametap", "nametap-discovery")
	if err != nil {
		panic(err)
	}
	binary, discoveryBinary = dir+"/nametap", dir+"/nametap-discovery"
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// A pod is what an agent says about its workload.
type pod struct{ name, namespace string }

// An agent is a running nametap agent.
type agent struct {
	*daemon
	m   *machine
	pod pod
}

// agent starts an agent of a pod, and returns when it has a table.
func (m *machine) agent(p pod, flags ...string) *agent {
	m.tb.Helper()
	a := m.launch(p, flags...)
	a.await("the agent has a table", func() bool { return a.logged("msg=ready") > 0 })
	return a
}

// launch starts an agent without waiting.
func (m *machine) launch(p pod, flags ...string) *agent {
	m.tb.Helper()
	args := append([]string{
		"agent", "--pod-name", p.name, "--namespace", p.namespace, "--dns-addr", dnsAddr, "--status-addr", statusAddr,
		"--resolv-conf", m.resolvConf(p.namespace), "--drain", "0s", "--state-dir", "", "--instance-ip", m.addrs[0],
	}, flags...)
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), m.runtime())
	return &agent{daemon: m.run(p.name, cmd), m: m, pod: p}
}

// runtime is the setting of the directory in which the private socket of the machine's agent is.
func (m *machine) runtime() string { return "RUNTIME_DIRECTORY=" + m.dir }

// proxy is the name of the agent at istiod.
func (a *agent) proxy() string { return a.pod.name + "." + a.pod.namespace }

// nametap runs one of nametap's commands for the agent.
func (a *agent) nametap(args ...string) []byte {
	a.tb.Helper()
	return []byte(a.m.Exec("env", append([]string{a.m.runtime(), binary}, append(args, "--status-addr", statusAddr)...)...))
}

// table returns the agent's table.
func (a *agent) table() table {
	a.tb.Helper()
	text := a.nametap("table", "--output", "json")
	var shown struct{ Table table }
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&shown); err != nil {
		a.tb.Fatalf("nametap table: %v\n%s", err, text)
	}
	return shown.Table.normal()
}

// plain returns the flags for an istiod without TLS.
func (m *machine) plain(d *istiod) []string {
	return []string{"--xds-plaintext", "--xds-addr", m.address(d.port(15010))}
}

// address returns an address of the cluster.
func (m *machine) address(port string) string {
	if strings.Contains(m.control, ":") {
		return "[" + m.control + "]:" + port
	}
	return m.control + ":" + port
}
