package vm_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// TestReload changes the --config file and reloads the unit under load. R10.
func TestReload(t *testing.T) {
	const config = "/etc/nametap.yaml"
	m := vm.Boot(t)
	m.Write(config, "log-level: info\n")
	m.Install("NAMETAP_CONFIG=" + config)
	m.Start()
	process := m.Run("systemctl", "show", "--property=MainPID", "nametap")
	tr := startTraffic(t, m)
	previous := "info"
	for _, level := range []string{"debug", "info"} {
		m.Write(config, "log-level: "+level+"\n")
		m.Run("systemctl", "reload", "nametap")
		change := "name=log-level from=" + previous + " to=" + level
		wait.Until(t, "the agent logs "+change, func() bool { return strings.Contains(m.Journal("nametap.service"), change) })
		previous = level
	}
	tr.more(time.Second)
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	if got := m.Run("systemctl", "show", "--property=MainPID", "nametap"); got != process {
		t.Errorf("the reload has replaced the process %s by %s", process, got)
	}
}
