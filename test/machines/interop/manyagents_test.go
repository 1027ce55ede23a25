package interop

import (
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

var manyAgents = flag.String("interop.agents", "100,500,1000", "numbers of agents of TestManyAgents, with commas")

// The log has what a changed host and a reconnect cost istiod and nametap-discovery with many
// simulated agents, from the same API server with 10,000 Services. bench/agents simulates the
// agents.
func TestManyAgents(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "agents")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-C", "../../../bench", "-o", binary, "./agents").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	c := newCluster(t)
	c.write("mesh.yaml", meshConfig)
	c.populate(population{*services})
	i, d := c.istiod(options{}), c.discovery("--max-clients-per-address=1000000") // all agents have one
	target := func(name, port string, of *daemon, mode string) string {
		return fmt.Sprintf("-target=%s,127.0.0.1:%s,%d,%s", name, port, of.cmd.Process.Pid, mode)
	}
	for number := range strings.SplitSeq(*manyAgents, ",") {
		n, err := strconv.Atoi(number)
		if err != nil {
			t.Fatalf("-interop.agents: %v", err)
		}
		repeats := min(max(2, 1000/n), 10) // a push to 1,000 agents takes istiod a minute
		agents := c.run("agents-"+number, exec.Command(binary, "-agents="+number, "-full=10", "-run=push,reconnect", "-repeats="+strconv.Itoa(repeats), "-limit=5m",
			"-api=https://"+apiAddr, "-token="+adminToken,
			target("istiod", i.port(15010), i.process, "plain"), target("nametap-discovery", discoveryPort, d.process, "hosts")))
		select {
		case <-agents.ended:
		case <-time.After(20 * time.Minute):
			t.Fatalf("%s agents are not done, see %s", number, agents.log)
		}
		if !agents.cmd.ProcessState.Success() {
			t.Errorf("%s agents: %v", number, agents.cmd.ProcessState)
		}
		t.Log(agents.text())
	}
}
