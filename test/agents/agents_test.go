// Package agents connects many agents to nametap-discovery at once, as the benchmark bench/agents does.
package agents

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
)

// D34: agents that all connect at once, over TLS, are served, and each then has the server's table. The benchmark
// fails if that is not so. It also measures how long this takes.
func TestAgentsConnectAtOnce(t *testing.T) {
	built, err := process.Build("nametap-discovery")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(built) })
	command := exec.Command("go", "run", "./agents", "-discovery="+filepath.Join(built, "nametap-discovery"),
		"-tls", "-agents=300", "-full=20", "-hosts=500", "-namespaces=3", "-repeats=1", "-limit=10m", "-run=reconnect")
	command.Dir = "../../bench"
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
}
