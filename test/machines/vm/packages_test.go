package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// settings are the lines of /etc/default/nametap that the network of a machine needs.
const settings = "NAMETAP_XDS_ADDR=" + vm.Control + "\nNAMETAP_XDS_PLAINTEXT=true\nPOD_NAMESPACE=shop\n"

// buildDeb builds the package of the agent in a directory with the sources, and returns its path.
func buildDeb(t *testing.T, dir, version string) string {
	t.Helper()
	return build(t, dir, "nametap_*.deb", "FORMATS=deb", "VERSION="+version)
}

// build builds packages with variables of make, and returns the path of the one whose name has a pattern.
func build(t *testing.T, dir, pattern string, variables ...string) string {
	t.Helper()
	build := exec.CommandContext(t.Context(), "make", append([]string{"--silent", "--directory=" + dir, "packages", "ARCHES=amd64"}, variables...)...)
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", build, err, output)
	}
	built, err := filepath.Glob(filepath.Join(dir, "bin/release", pattern))
	if err != nil || len(built) != 1 {
		t.Fatalf("make packages has built %q, %v", built, err)
	}
	copied := filepath.Join(t.TempDir(), filepath.Base(built[0]))
	if err := os.Rename(built[0], copied); err != nil {
		t.Fatal(err)
	}
	return copied
}

// put copies a file of this host into a machine, and returns its path there.
func put(t *testing.T, m *vm.Machine, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	target := "/var/tmp/" + filepath.Base(path)
	m.Write(target, string(content))
	return target
}

// dpkg runs dpkg. It keeps the file of settings, where a user would be asked.
func dpkg(m *vm.Machine, args ...string) {
	m.Run("env", append([]string{"DEBIAN_FRONTEND=noninteractive", "dpkg", "--force-confold"}, args...)...)
}

// A state is what packages change on a machine.
type state struct{ files, users, units, rules, interfaces string }

// kept are files that a package may leave: logs, databases and backups of other programs.
var kept = regexp.MustCompile(`(?m)^/(var/log|var/lib/dpkg|var/lib/systemd|var/cache|var/tmp|etc/(passwd|group|shadow|gshadow)-|etc/\.pwd\.lock).*\n`)

func stateOf(m *vm.Machine) state {
	return state{
		files: kept.ReplaceAllString(m.Run("sh", "-euc", `find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run \) -prune -o -print | sort
			find /run -name '*nametap*'`), ""),
		users:      m.Run("cat", "/etc/passwd", "/etc/group"),
		units:      m.Run("systemctl", "list-unit-files", "--no-legend") + m.Run("systemctl", "list-units", "--all", "--no-legend", "--plain", "*nametap*"),
		rules:      m.Net.Rules(),
		interfaces: m.Run("sh", "-euc", "ls /sys/class/net"),
	}
}

func (s state) compare(t *testing.T, before state) {
	t.Helper()
	for what, pair := range map[string][2]string{
		"files": {before.files, s.files}, "users": {before.users, s.users}, "units": {before.units, s.units},
		"rules": {before.rules, s.rules}, "interfaces": {before.interfaces, s.interfaces},
	} {
		lines := map[string]int{}
		for line := range strings.Lines(pair[0]) {
			lines[line]--
		}
		for line := range strings.Lines(pair[1]) {
			lines[line]++
		}
		for line, n := range lines {
			if n != 0 {
				t.Errorf("%s: %+d times %s", what, n, line)
			}
		}
	}
}

// TestDeb installs the package, starts the agent, and removes and purges the package. The
// installation alone leaves the DNS of the machine unchanged, also over a reboot. The same goes
// for an installation over a stopped agent. P4. The removal leaves the settings and the state,
// the purge leaves nothing. P2.
func TestDeb(t *testing.T) {
	m := vm.Boot(t)
	deb := put(t, m, buildDeb(t, vm.Repository(), "0.1.0"))
	before := stateOf(m)

	dpkg(m, "--install", deb)
	untouched := func() {
		t.Helper()
		if got := m.Lookup(vm.Mesh); got != vm.NamedIP {
			t.Errorf("%s has %s, want %s from the nameserver", vm.Mesh, got, vm.NamedIP)
		}
		if got := m.Net.Rules(); got != before.rules {
			t.Errorf("rules:\n%s\nbefore:\n%s", got, before.rules)
		}
		if sockets := m.Run("ss", "--no-header", "--listening", "--tcp", "--udp", "--numeric"); strings.Contains(sockets, ":15053") {
			t.Errorf("sockets:\n%s", sockets)
		}
		if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" {
			t.Errorf("processes:\n%s", processes)
		}
	}
	untouched()
	m.Reboot()
	untouched()
	if got := m.Run("id", "nametap"); !strings.HasPrefix(got, "uid=1337(nametap) gid=1337(nametap)") {
		t.Errorf("the user is %s", got)
	}

	m.Write("/etc/default/nametap", settings)
	m.Run("systemctl", "enable", "--now", "nametap.socket", "nametap.service")
	m.AwaitMesh()
	m.Run("systemctl", "stop", "nametap.socket", "nametap.service")
	dpkg(m, "--install", deb) // an agent that was stopped stays so
	untouched()

	m.Write("/etc/default/nametap", settings+"NAMETAP_CAPTURE_FAIL_OPEN=false\n")
	m.Run("systemctl", "start", "nametap.socket", "nametap.service")
	m.AwaitMesh()
	if got := m.Run("nametap", "status"); !strings.Contains(got, "ready          yes") {
		t.Errorf("nametap status prints:\n%s", got)
	}

	dpkg(m, "--remove", "nametap")
	untouched()
	if got := m.Read("/etc/default/nametap"); !strings.HasPrefix(got, settings) {
		t.Errorf("/etc/default/nametap has %q", got)
	}
	if state := m.Run("systemctl", "list-units", "--plain", "--no-legend", "--state=failed"); state != "" {
		t.Errorf("failed units:\n%s", state)
	}
	dpkg(m, "--purge", "nametap")
	untouched()
	stateOf(m).compare(t, before)
}

// TestDebUpgradesUnderLoad upgrades and downgrades the package under load. No query is lost, no
// answer comes from a nameserver, the agent is the package's, and edited settings stay. P3, V1.
func TestDebUpgradesUnderLoad(t *testing.T) {
	m := vm.Boot(t)
	other := otherVersion(t, "echo '# A new line of the package.' >>deploy/systemd/nametap.default")
	debs := []string{put(t, m, buildDeb(t, other, "9.9.9")), put(t, m, buildDeb(t, vm.Repository(), "0.1.0"))}
	dpkg(m, "--install", debs[1])
	m.Write("/etc/default/nametap", settings)
	m.Run("systemctl", "enable", "--now", "nametap.socket", "nametap.service")
	m.AwaitMesh()
	tr := startTraffic(t, m)
	previous := m.Run("nametap", "version")
	replace(tr, min(*rounds, 10), func(round int) {
		dpkg(m, "--install", debs[round%2])
		if version := m.Run("nametap", "version"); version == previous {
			t.Fatalf("still version %s", version)
		} else {
			previous = version
		}
		pid := strings.TrimSpace(m.Run("systemctl", "show", "--property=MainPID", "--value", "nametap.service"))
		if program := m.Run("readlink", "/proc/"+pid+"/exe"); program != "/usr/bin/nametap\n" {
			t.Errorf("nametap.service runs %s", program)
		}
	})
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	if got := m.Read("/etc/default/nametap"); got != settings {
		t.Errorf("/etc/default/nametap has %q", got)
	}
}
