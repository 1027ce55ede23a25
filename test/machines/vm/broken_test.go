package vm_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// binary is where `make install` puts the agent.
const binary = "/usr/local/bin/nametap"

// TestAgentCannotStart breaks the agent in several ways and restarts it. The host has DNS again
// within 2 s, without mesh names, and systemd shows the reason. A repaired agent starts. V2.
func TestAgentCannotStart(t *testing.T) {
	program := func(text string) func(*vm.Machine) {
		return func(m *vm.Machine) {
			m.Run("mv", binary, binary+".good")
			m.Write(binary, "#!/bin/sh\n"+text+"\n")
			m.Run("chmod", "755", binary)
		}
	}
	for name, test := range map[string]struct {
		breakAgent, repair func(m *vm.Machine)
		reason             string // in the output of systemctl status
	}{
		"setting": {
			func(m *vm.Machine) { m.Run("sed", "-i", "$ a DNS_PROXY_ADDR=nonsense", "/etc/default/nametap") },
			func(m *vm.Machine) { m.Run("sed", "-i", "/DNS_PROXY_ADDR/ d", "/etc/default/nametap") },
			"nonsense",
		},
		"no program": {func(m *vm.Machine) { m.Run("mv", binary, binary+".good") }, restore, binary + " is missing"},
		"crash":      {program("kill -SEGV $$"), restore, "status=11/SEGV"},
		"hang":       {program("exec sleep 1000"), restore, "timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			m := vm.Boot(t)
			m.Install()
			m.Start()
			tr := startTraffic(t, m)
			test.breakAgent(m)
			tr.forwardedGap()
			m.Run("systemctl", "restart", "--no-block", "nametap")
			foreign := tr.count(load.Foreign)
			wait.Until(t, "the nameserver answers instead of the agent", func() bool { return tr.count(load.Foreign) > foreign })
			tr.more(time.Second / 10)
			tr.wantOutage()
			wait.Until(t, "systemctl status shows the reason: "+test.reason, func() bool {
				status, _ := m.Try("systemctl", "status", "--lines=20", "nametap.service")
				return strings.Contains(status, test.reason)
			})
			test.repair(m)
			began := time.Now()
			m.Run("systemctl", "restart", "nametap.service")
			m.AwaitMesh()
			t.Logf("the repaired agent answers after %v", time.Since(began).Round(time.Millisecond))
		})
	}
}

// restore puts the agent back.
func restore(m *vm.Machine) { m.Run("mv", binary+".good", binary) }

// TestRestartsBackOff lets an agent fail until systemd restarts it once in 10 s. V2.
func TestRestartsBackOff(t *testing.T) {
	m := vm.Boot(t)
	m.Install()
	m.Start()
	m.Run("sed", "-i", "$ a DNS_PROXY_ADDR=nonsense", "/etc/default/nametap")
	m.Run("systemctl", "restart", "--no-block", "nametap")
	const pause = 10 * time.Second
	var starts []time.Time
	wait.Until(t, fmt.Sprintf("%v pass between two starts", pause), func() bool {
		starts = timesOf(t, m.Journal("nametap.service"), "systemd[1]: Starting nametap.service")
		n := len(starts)
		return n > 1 && starts[n-1].Sub(starts[n-2]) >= pause
	})
	took := starts[len(starts)-1].Sub(starts[0]).Round(time.Second)
	t.Logf("%d starts in %v", len(starts), took)
	if len(starts) > 20 {
		t.Errorf("%d starts in %v, want at most 20", len(starts), took)
	}
}

// timesOf returns the times of the lines of a journal that contain a text.
func timesOf(t *testing.T, journal, text string) []time.Time {
	t.Helper()
	var times []time.Time
	for line := range strings.Lines(journal) {
		if !strings.Contains(line, text) {
			continue
		}
		at, err := time.Parse("Jan _2 15:04:05.000000", strings.Join(strings.Fields(line)[:3], " "))
		if err != nil {
			t.Fatalf("the journal has a line without a time: %v", err)
		}
		times = append(times, at)
	}
	return times
}
