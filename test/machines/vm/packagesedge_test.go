package vm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// enable writes the settings, and starts the agent of the package.
func enable(m *vm.Machine, more string) {
	m.Write("/etc/default/nametap", settings+more)
	m.Run("systemctl", "enable", "--now", "nametap.socket", "nametap.service")
	m.AwaitMesh()
}

// program returns the program of a unit's process.
func program(m *vm.Machine, unit string) string {
	pid := strings.TrimSpace(m.Run("systemctl", "show", "--property=MainPID", "--value", unit))
	return strings.TrimSpace(m.Run("readlink", "/proc/"+pid+"/exe"))
}

// TestDebChangesListeners upgrades to a package whose nametap.socket has other listeners, and back,
// under load. Each query has an answer, and afterwards the agent has the next listeners from systemd, which
// holds them for a later restart.
// P3.
func TestDebChangesListeners(t *testing.T) {
	m := vm.Boot(t)
	const change = `sed -i 's/^\(Listen.*\)=127.0.0.1:/\1=0.0.0.0:/; s/^\(Listen.*\)=\[::1\]:/\1=[::]:/' deploy/systemd/nametap.socket`
	debs := []string{put(t, m, buildDeb(t, otherVersion(t, change), "9.9.9")), put(t, m, buildDeb(t, vm.Repository(), "0.1.0"))}
	dpkg(m, "--install", debs[1])
	enable(m, "")
	for round := range 4 {
		tr := startTraffic(t, m)
		dpkg(m, "--install", debs[round%2])
		tr.more(time.Second)
		t.Logf("longest time without the agent: %v", tr.gap())
		// Meanwhile the nameserver answers.
		if mesh, forwarded := tr.stop(load.Right, load.Foreign); mesh+forwarded > 0 {
			t.Errorf("round %d: %d queries for the mesh name and %d for others have no answer", round, mesh, forwarded)
		}
		wait.Until(t, "the machine has rules", m.Captured)
		listeners := m.Run("ss", "--no-header", "--listening", "--udp", "--tcp", "--numeric", "--processes", "sport", "=", ":15053")
		address := []string{"0.0.0.0:15053", "127.0.0.1:15053"}[round%2]
		for line := range strings.Lines(listeners) {
			if strings.Contains(line, "127.0.0.1:") || strings.Contains(line, "0.0.0.0:15053") {
				if !strings.Contains(line, address) || !strings.Contains(line, `"systemd"`) || !strings.Contains(line, `"nametap"`) {
					t.Errorf("round %d: want %s in systemd and nametap: %s", round, address, line)
				}
			}
		}
		if n := strings.Count(listeners, "\n"); n != 4 {
			t.Errorf("round %d: %d listeners, want 4:\n%s", round, n, listeners)
		}
	}
}

// TestDebOnOtherMachines installs and removes the package on machines that are not as it expects. P13, P14,
// P15.
func TestDebOnOtherMachines(t *testing.T) {
	deb := buildDeb(t, vm.Repository(), "0.1.0")
	t.Run("chroot", func(t *testing.T) { inChroot(t, deb) })
	t.Run("1337 is taken", func(t *testing.T) { taken(t, deb) })
	t.Run("make install", func(t *testing.T) { overMakeInstall(t, deb) })
}

// inChroot installs and purges the package in a chroot of a machine with an agent. The chroot has the
// network of the machine, and sees its /run, its /proc or neither. The package is configured each time,
// and the agent and the rules of the machine stay.
func inChroot(t *testing.T, deb string) {
	t.Helper()
	m := vm.Boot(t)
	path := put(t, m, deb)
	dpkg(m, "--install", path)
	enable(m, "")
	rules, process := m.Net.Rules(), running(m)
	m.Run("sh", "-euc", `mkdir -p /srv/layer /srv/root
mount -t tmpfs layer /srv/layer
mkdir /srv/layer/upper /srv/layer/work
mount -t overlay root -o lowerdir=/,upperdir=/srv/layer/upper,workdir=/srv/layer/work /srv/root`)
	inside := func(command ...string) string {
		t.Helper()
		return m.Run("env", append([]string{"DEBIAN_FRONTEND=noninteractive"}, command...)...)
	}
	chroot := []string{"chroot", "/srv/root"}
	// A container, whose first process is a shell and which has directories of its host.
	container := []string{"unshare", "--pid", "--fork", "chroot", "/srv/root"}
	for _, place := range []struct {
		name, mount string
		enter       []string
	}{
		{"an empty chroot", "true", chroot},
		{"a chroot with /run", "mount --bind /run /srv/root/run", chroot},
		{"a chroot with /run and /proc", "mount --bind /run /srv/root/run && mount --bind /proc /srv/root/proc", chroot},
		{"a container with /run", "mount --bind /run /srv/root/run", container},
		{"a container with /run and /proc", "mount --bind /run /srv/root/run && mount --bind /proc /srv/root/proc", container},
	} {
		m.Run("sh", "-euc", place.mount)
		for _, args := range [][]string{{"dpkg", "--purge", "nametap"}, {"dpkg", "--install", path}, {"dpkg", "--install", path}, {"dpkg", "--remove", "nametap"}, {"dpkg", "--install", path}} {
			inside(append(place.enter, args...)...)
			if got := m.Net.Rules(); got != rules {
				t.Fatalf("%s: after %q the rules of the machine are:\n%s\nbefore:\n%s", place.name, args, got, rules)
			}
		}
		if got := inside(append(place.enter, "dpkg-query", "--show", "--showformat=${Status}", "nametap")...); got != "install ok installed" {
			t.Errorf("%s: the package is %q", place.name, got)
		}
		if got := running(m); got != process {
			t.Errorf("%s: the agent of the machine is %s, was %s", place.name, got, process)
		}
		if got := m.Run("systemctl", "is-enabled", "nametap.service", "nametap.socket"); got != "enabled\nenabled\n" {
			t.Errorf("%s: the units of the machine are %q", place.name, got)
		}
		m.Run("sh", "-euc", "for dir in run proc; do ! mountpoint --quiet /srv/root/$dir || umount /srv/root/$dir; done")
	}
	if got := m.Lookup(vm.Mesh); got != vm.MeshIP {
		t.Errorf("%s has %s", vm.Mesh, got)
	}
	m.Run("umount", "/srv/root", "/srv/layer")
}

// taken installs the package where others have the numbers 1337. The package says which settings the agent
// needs. With them, the queries of these others are captured.
func taken(t *testing.T, deb string) {
	t.Helper()
	for name, create := range map[string]string{
		"user":           "groupadd --gid 2000 app && useradd --uid 1337 --gid 2000 app",
		"group":          "groupadd --gid 1337 app && useradd --uid 2000 --gid 1337 app",
		"user and group": "groupadd --gid 1337 app && useradd --uid 1337 --gid 1337 app",
	} {
		m := vm.Boot(t)
		path := put(t, m, deb)
		m.Run("sh", "-euc", create)
		said, err := m.Try("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--install", path)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, said)
		}
		var lines []string
		for line := range strings.Lines(said) {
			if strings.HasPrefix(line, "NAMETAP_CAPTURE_AGENT_") {
				lines = append(lines, line)
			}
		}
		if len(lines) != 2 {
			t.Fatalf("%s: no settings in:\n%s", name, said)
		}
		enable(m, strings.Join(lines, ""))
		lookup := m.Run("setpriv", "--reuid=app", "--regid=app", "--clear-groups", "getent", "ahostsv4", vm.Mesh)
		if !strings.HasPrefix(lookup, vm.MeshIP+" ") {
			t.Errorf("%s: a program of the other user gets %q, want %s", name, lookup, vm.MeshIP)
		}
		if got := m.Lookup("other.example.org"); got != vm.NamedIP {
			t.Errorf("%s: a forwarded name has %q", name, got)
		}
		dpkg(m, "--purge", "nametap")
		if users := m.Run("cat", "/etc/passwd", "/etc/group"); strings.Contains(users, "nametap") || strings.Count(users, "app:x:") != 2 {
			t.Errorf("%s: after the purge, the users and groups are:\n%s", name, users)
		}
	}
}

// replaceInstallation returns the commands of docs/packages.md that remove an installation of `make install`.
func replaceInstallation(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(vm.Repository(), "docs/packages.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "### After `make install`")
	section, _, found := strings.Cut(section, "\n#")
	if !found {
		t.Fatal("docs/packages.md does not say how to go over to the package")
	}
	var commands strings.Builder
	for line := range strings.Lines(section) {
		if command, indented := strings.CutPrefix(line, "    "); indented {
			commands.WriteString(strings.TrimPrefix(command, "sudo "))
		}
	}
	return commands.String()
}

// overMakeInstall installs the package over an agent of `make install`, which systemd and the shell prefer. The
// package says so, and its purge leaves that agent, its state and its user. After the commands of
// docs/packages.md the package is in use.
func overMakeInstall(t *testing.T, deb string) {
	t.Helper()
	m := vm.Boot(t)
	m.Install()
	m.Start()
	path := put(t, m, deb)
	rules, process := m.Net.Rules(), running(m)
	install := func() {
		t.Helper()
		said, err := m.Try("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--force-confold", "--install", path)
		if err != nil || !strings.Contains(said, "this package is not in use") || !strings.Contains(said, "/usr/local/lib/systemd/system/nametap.service") {
			t.Errorf("dpkg --install: %v\n%s", err, said)
		}
	}
	install()
	same := func(when string) {
		t.Helper()
		if got := running(m); got != process {
			t.Errorf("%s: the agent is %s, was %s", when, got, process)
		}
		if got := m.Net.Rules(); got != rules {
			t.Errorf("%s: the rules are:\n%s\nbefore:\n%s", when, got, rules)
		}
		if got := m.Lookup(vm.Mesh); got != vm.MeshIP {
			t.Errorf("%s: %s has %s", when, vm.Mesh, got)
		}
	}
	same("after the installation")
	dpkg(m, "--purge", "nametap")
	same("after the purge")
	if got := m.Run("id", "nametap"); !strings.HasPrefix(got, "uid=1337(nametap) gid=1337(nametap)") {
		t.Errorf("the user is %s", got)
	}
	m.Run("ls", "/var/lib/nametap")

	install()
	m.Write("/etc/default/nametap", settings)
	m.Run("sh", "-euxc", replaceInstallation(t))
	m.AwaitMesh()
	if got := program(m, "nametap.service"); got != "/usr/bin/nametap" {
		t.Errorf("nametap.service runs %s", got)
	}
	if left := m.Run("find", "/usr/local", "(", "-name", "*nametap*", "-o", "-name", "back-off", ")"); left != "" {
		t.Errorf("left in /usr/local:\n%s", left)
	}
	dpkg(m, "--purge", "nametap")
	if m.Captured() {
		t.Errorf("rules:\n%s", m.Net.Rules())
	}
	// The package has not made the user.
	m.Run("id", "nametap")
}
