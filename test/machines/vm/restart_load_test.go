package vm_test

import (
	"flag"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// rounds is how often the agent's process is replaced.
var rounds = flag.Int("vm.rounds", 100, "how often a test replaces the agent's process under load")

// TestRestartsUnderLoad restarts the agent under load. V1.
func TestRestartsUnderLoad(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	replace(tr, *rounds, func(int) { m.Run("systemctl", "restart", "nametap") })
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
}

// TestKillsUnderLoad kills the agent under load. Only queries that the process has read may be
// lost: almost none for the mesh name, which it answers at once, and some whose answers it
// awaits from a nameserver. V1.
func TestKillsUnderLoad(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	tr := startTraffic(t, m)
	replace(tr, *rounds, func(int) {
		before := running(m)
		m.Run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "nametap")
		wait.Until(t, "systemd has started another agent", func() bool {
			now := running(m)
			return now != before && strings.Contains(now, "ActiveState=active")
		})
		wait.Until(t, "the next restart is without a pause", func() bool {
			_, err := m.Try("test", "-e", "/run/nametap/starts")
			return err != nil
		})
	})
	if n := tr.count(load.Foreign, load.Wrong, load.Failed); n > 0 {
		t.Errorf("%d queries have a wrong answer", n)
	}
	mesh, forwarded := tr.stop(load.Right)
	t.Logf("%d queries for the mesh name and %d for others were lost with %d processes", mesh, forwarded, *rounds)
	if mostMesh, mostForwarded := 2+*rounds/5, 20**rounds; mesh > mostMesh || forwarded > mostForwarded {
		t.Errorf("%d queries for the mesh name and %d for others are lost, want at most %d and %d", mesh, forwarded, mostMesh, mostForwarded)
	}
}

// TestUpgradesUnderLoad installs another version over the running one, and restarts it, under
// load. V1.
func TestUpgradesUnderLoad(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	sources := []string{otherVersion(t, ""), vm.Repository()}
	version := m.Run("nametap", "version")
	tr := startTraffic(t, m)
	replace(tr, min(*rounds, 10), func(round int) {
		m.InstallFrom(sources[round%2])
		m.Run("systemctl", "daemon-reload")
		m.Run("systemctl", "restart", "nametap")
		previous := version
		if version = m.Run("nametap", "version"); version == previous {
			t.Fatalf("still version %s after the upgrade", version)
		}
	})
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
}

// running returns the agent's process and the state of its unit, both of one moment.
func running(m *vm.Machine) string {
	return m.Run("systemctl", "show", "--property=MainPID,ActiveState", "nametap")
}

// otherVersion returns a directory with the sources of nametap, built as version v9.9.9 after a
// script has changed them.
func otherVersion(t *testing.T, change string) string {
	t.Helper()
	dir := t.TempDir()
	const script = `cd "$1"
git ls-files -z | xargs -0 cp --parents --target-directory="$2"
cd "$2"
eval "$3"
git init --quiet
git add .
git -c user.name=test -c user.email=test@example.org commit --quiet --message=test
git tag v9.9.9
GOFLAGS=-buildvcs=true make --silent build`
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script, "sh", vm.Repository(), dir, change)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building another version: %v\n%s", err, output)
	}
	return dir
}

// replace calls change rounds times, each after a second with answers, and logs how long the
// queries of each round waited.
func replace(tr *traffic, rounds int, change func(round int)) {
	tr.t.Helper()
	var gaps []time.Duration
	var took time.Duration
	for round := range rounds {
		tr.gap()
		began := time.Now()
		change(round)
		took += time.Since(began)
		tr.more(time.Second)
		gaps = append(gaps, tr.gap().Round(time.Millisecond))
	}
	slices.Sort(gaps)
	tr.t.Logf("%d rounds, %v each; longest time without an answer: median %v, longest %v",
		rounds, (took / time.Duration(rounds)).Round(time.Millisecond), gaps[rounds/2], gaps[rounds-1])
}
