package vm

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// release is the directory of a release to install.
var release = flag.String("vm.release", "", "install the packages of the release in this directory instead of the sources")

// build builds packages of a format, unless there is a release, and returns the content of the one whose name has a pattern.
func build(format, pattern string) (content []byte, err error) {
	dir := *release
	if dir == "" {
		dir = filepath.Join(lab.Repository(), "bin/release")
		build := exec.Command("make", "--silent", "--directory="+lab.Repository(), "packages", "ARCHES=amd64", "VERSION=0.1.0", "FORMATS="+format)
		if output, err := build.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("%s: %w\n%s", build, err, output)
		}
	}
	built, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(built) != 1 {
		return nil, fmt.Errorf("%s has the packages %q, want one (%w)", dir, built, err)
	}
	return os.ReadFile(built[0])
}

// builtDeb builds the package of the sources once.
var builtDeb = sync.OnceValues(func() ([]byte, error) { return build("deb", "nametap_*_amd64.deb") })

// A debMachine is a machine with the package of the agent.
type debMachine struct {
	*lab.Machine
	t   *testing.T
	deb string // its path
}

// bootDeb boots a machine, and puts the package there. It is not installed.
func bootDeb(t *testing.T) debMachine {
	t.Helper()
	content, err := builtDeb()
	if err != nil {
		t.Fatal(err)
	}
	m := debMachine{lab.Boot(t), t, "/var/tmp/nametap_0.1.0-1_amd64.deb"}
	m.Write(m.deb, string(content))
	return m
}

// dpkg runs dpkg. It keeps the file of settings, where a user would be asked.
func (m debMachine) dpkg(args ...string) {
	m.Run("env", append([]string{"DEBIAN_FRONTEND=noninteractive", "dpkg", "--force-confold"}, args...)...)
}

// enable installs the package, writes the settings, and starts the agent.
func (m debMachine) enable(settings ...string) {
	m.dpkg("--install", m.deb)
	m.Configure(settings...)
	m.Systemctl("enable")
	m.Systemctl("start")
	m.AwaitMesh()
}

// program returns the program of the agent's process.
func program(m *lab.Machine) string {
	return strings.TrimSpace(m.Run("readlink", "/proc/"+m.Property("MainPID", "nametap.service")+"/exe"))
}

// A state is what packages change on a machine, by kinds.
type state map[string]string

// kept are files that a package may leave: logs, databases and backups of other programs.
var kept = regexp.MustCompile(`(?m)^/(var/log|var/lib/dpkg|var/lib/systemd|var/cache|var/tmp|etc/(passwd|group|shadow|gshadow)-|etc/\.pwd\.lock).*\n`)

func stateOf(m *lab.Machine) state {
	return state{
		"files": kept.ReplaceAllString(m.Run("sh", "-euc", `find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run \) -prune -o -print | sort
			find /run -name '*nametap*'`), ""),
		"users":      m.Run("cat", "/etc/passwd", "/etc/group"),
		"units":      m.Run("systemctl", "list-unit-files", "--no-legend") + m.Run("systemctl", "list-units", "--all", "--no-legend", "--plain", "*nametap*"),
		"rules":      m.Net.Rules(),
		"interfaces": m.Run("ls", "/sys/class/net"),
	}
}

func (s state) compare(t *testing.T, before state) {
	t.Helper()
	for what := range s {
		lines := map[string]int{}
		for line := range strings.Lines(before[what]) {
			lines[line]--
		}
		for line := range strings.Lines(s[what]) {
			lines[line]++
		}
		for line, n := range lines {
			if n != 0 {
				t.Errorf("%s: %+d times %s", what, n, line)
			}
		}
	}
}

// TestDeb installs the package, starts the agent, and removes and purges the package. The installation alone leaves the
// DNS of the machine unchanged, also over a reboot. The same goes for an installation over a stopped agent. P4. The removal
// leaves the settings and the state, the purge leaves nothing. P2.
func TestDeb(t *testing.T) {
	m := bootDeb(t)
	before := stateOf(m.Machine)
	m.dpkg("--install", m.deb)
	untouched := func() {
		t.Helper()
		wantNames(t, m.Machine, map[string]string{lab.Mesh: lab.NamedIP})
		if got := m.Net.Rules(); got != before["rules"] {
			t.Errorf("rules:\n%s\nbefore:\n%s", got, before["rules"])
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
	m.enable()
	m.Systemctl("stop")
	m.dpkg("--install", m.deb) // an agent that was stopped stays so
	untouched()

	m.enable("NAMETAP_CAPTURE_FAIL_OPEN=false")
	settings := m.Read("/etc/default/nametap")
	m.dpkg("--remove", "nametap")
	untouched()
	if got := m.Read("/etc/default/nametap"); got != settings {
		t.Errorf("/etc/default/nametap has %q", got)
	}
	if state := m.Run("systemctl", "list-units", "--plain", "--no-legend", "--state=failed"); state != "" {
		t.Errorf("failed units:\n%s", state)
	}
	m.dpkg("--purge", "nametap")
	untouched()
	stateOf(m.Machine).compare(t, before)
}

// TestDebFirstBoot boots a copy of an image with the package for the first time. systemd does not enable the agent. P4.
func TestDebFirstBoot(t *testing.T) {
	m := bootDeb(t)
	m.dpkg("--install", m.deb)
	m.Write("/etc/machine-id", "uninitialized\n")
	m.Reboot()
	if m.Read("/etc/machine-id") == "uninitialized\n" {
		t.Fatal("it was not a first boot")
	}
	for _, unit := range lab.Units() {
		if state, _ := m.Try("systemctl", "is-enabled", unit); state != "disabled\n" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	wantNotCaptured(t, m.Machine)
}

// otherListeners changes nametap.socket.
const otherListeners = `sed -i 's/^\(Listen.*\)=127.0.0.1:/\1=0.0.0.0:/; s/^\(Listen.*\)=\[::1\]:/\1=[::]:/' usr/lib/systemd/system/nametap.socket`

// changed makes a package of a later version in which a script has changed the files, and returns its path.
func (m debMachine) changed(script string) string {
	const changed = "/var/tmp/nametap_9.9.9-1_amd64.deb"
	m.Run("sh", "-euc", `rm -rf /var/tmp/raw
dpkg-deb --raw-extract "$1" /var/tmp/raw
cd /var/tmp/raw
sed -i 's/^Version: .*/Version: 9.9.9-1/' DEBIAN/control
eval "$3"
dpkg-deb --root-owner-group -Znone --build . "$2"`, "sh", m.deb, changed, script)
	return changed
}

// wantListeners fails the test unless systemd and the agent have the listeners of a package.
func (m debMachine) wantListeners(deb, when string) {
	m.t.Helper()
	address := map[bool]string{true: "0.0.0.0:15053", false: "127.0.0.1:15053"}[deb != m.deb]
	listeners := m.Run("ss", "--no-header", "--listening", "--udp", "--ipv4", "--numeric", "--processes", "sport", "=", ":15053")
	if !strings.Contains(listeners, address) || !strings.Contains(listeners, `"systemd"`) || !strings.Contains(listeners, `"nametap"`) {
		m.t.Errorf("%s: want %s in systemd and nametap:\n%s", when, address, listeners)
	}
}

// TestDebUpgrades upgrades and downgrades the package under load: to a later version, whose file of settings has changed,
// where no query is lost, no answer comes from a nameserver, and edited settings stay; and to one with other listeners,
// where each query has an answer. P3, V1.
func TestDebUpgrades(t *testing.T) {
	m := bootDeb(t)
	later := m.changed("echo '# A new line of the package.' >>etc/default/nametap")
	m.enable()
	settings := m.Read("/etc/default/nametap")
	tr := startTraffic(t, m.Machine)
	replace(tr, 4, func(round int) {
		process := running(m.Machine)
		m.dpkg("--install", []string{later, m.deb}[round%2])
		if running(m.Machine) == process {
			t.Error("the agent is not replaced")
		}
	})
	tr.none(load.Right)
	if got := m.Read("/etc/default/nametap"); got != settings {
		t.Errorf("/etc/default/nametap has %q", got)
	}
	other := m.changed(otherListeners)
	for _, deb := range []string{other, m.deb} {
		tr := startTraffic(t, m.Machine)
		m.dpkg("--install", deb)
		tr.more(time.Second)
		tr.none(load.Right, load.Foreign) // meanwhile the nameserver answers
		wait.Until(t, "the machine has rules", m.Captured)
		m.wantListeners(deb, "after the upgrade")
	}
}

// TestDebInAnyState installs the package again, and purges it, while its agent is stopped, hangs or cannot run. It runs
// after an upgrade unless it was stopped, and no unit, process, user or rule that captures is left after a purge. The
// machine has DNS all the time but for the 2 s of the lease. P2, P3, V2.
func TestDebInAnyState(t *testing.T) {
	m := bootDeb(t)
	const killed = "systemctl kill --kill-whom=main --signal=KILL nametap.service"
	for _, s := range []struct{ name, reach string }{
		{"stopped", "systemctl stop nametap.socket"},
		{"stopped service", "systemctl stop nametap.service"},
		{"masked", "systemctl mask nametap.service"},
		{"hangs", "systemctl kill --kill-whom=main --signal=STOP nametap.service"},
		{"killed, program missing", "rm /usr/bin/nametap && " + killed},
		{"files missing", "rm -r /run/nametap /usr/libexec/nametap && " + killed},
		{"user missing", "userdel nametap 2>/dev/null || sed -i '/^nametap:/ d' /etc/passwd; " + killed},
	} {
		m.Sub(t, s.name, func(t *testing.T) {
			for _, change := range []string{"--install", "--purge"} {
				if s.name == "masked" && change == "--install" {
					continue
				}
				m.enable()
				tr := startTraffic(t, m.Machine)
				m.Run("sh", "-euc", s.reach)
				tr.loads[2].Cut()
				switch {
				case change == "--purge":
					m.dpkg(change, "nametap")
					tr.past(time.Second / 2)
				case strings.HasPrefix(s.name, "stopped"):
					m.dpkg(change, m.deb)
					if state := m.Property("ActiveState", "nametap.service"); state != "inactive" {
						t.Errorf("nametap.service is %s", state)
					}
				default:
					m.dpkg(change, m.deb)
					m.AwaitMesh()
					wantActive(t, m.Machine, "after the upgrade")
				}
				wait.Until(t, "queries have answers", func() bool { return m.Lookup("other.example.org") == lab.NamedIP })
				tr.more(time.Second / 10)
				tr.wantGap(tr.loads[2].Cut())
				tr.end()
			}
			if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" {
				t.Errorf("processes are left:\n%s", processes)
			}
			m.Run("systemctl", "unmask", "nametap.service")
			if units := m.Run("systemctl", "list-units", "--all", "--no-legend", "--plain", "*nametap*"); units != "" {
				t.Errorf("units are left:\n%s", units)
			}
			if users := m.Run("cat", "/etc/passwd", "/etc/group"); strings.Contains(users, "nametap") {
				t.Errorf("users are left:\n%s", users)
			}
			if !strings.Contains(s.name, "program missing") { // without it, rules stay that capture nothing
				wantNotCaptured(t, m.Machine)
			}
		})
	}
}

// TestDebElsewhere installs, removes and purges the package in other roots of a machine with an agent: in a chroot that
// has the network of the machine, and sees its /run, its /proc or neither; in a container, whose first process is a shell;
// and in a directory, without chroot. Only these change: the agent and the rules of the machine stay. P13.
func TestDebElsewhere(t *testing.T) {
	m := bootDeb(t)
	m.enable()
	state := func() string {
		return running(m.Machine) + m.Net.Rules() + m.Run("cat", "/etc/passwd", "/etc/group") + m.Run("systemctl", "is-enabled", "nametap.service", "nametap.socket") +
			m.Run("sh", "-c", "ls -d /var/lib/nametap /var/lib/nametap-made /run/nametap*")
	}
	before := state()
	m.Run("sh", "-euc", `mkdir -p /srv/layer /srv/root
mount -t tmpfs layer /srv/layer
mkdir /srv/layer/upper /srv/layer/work
mount -t overlay root -o lowerdir=/,upperdir=/srv/layer/upper,workdir=/srv/layer/work /srv/root`)
	chroot := []string{"chroot", "/srv/root"}
	container := []string{"unshare", "--pid", "--fork", "chroot", "/srv/root"}
	for _, place := range []struct {
		name, mount string
		enter       []string
	}{
		{"an empty chroot", "true", chroot},
		{"a chroot with /run", "mount --bind /run /srv/root/run", chroot},
		{"a container with /run and /proc", "mount --bind /run /srv/root/run && mount --bind /proc /srv/root/proc", container},
	} {
		m.Run("sh", "-euc", place.mount)
		for _, args := range [][]string{{"dpkg", "--purge", "nametap"}, {"dpkg", "--install", m.deb}, {"dpkg", "--install", m.deb}, {"dpkg", "--remove", "nametap"}, {"dpkg", "--install", m.deb}} {
			m.Run("env", append(append([]string{"DEBIAN_FRONTEND=noninteractive"}, place.enter...), args...)...)
			if after := state(); after != before {
				t.Fatalf("%s: after %q the machine is\n%s\nbefore:\n%s", place.name, args, after, before)
			}
		}
		if got := m.Run("env", append(place.enter, "dpkg-query", "--show", "--showformat=${Status}", "nametap")...); got != "install ok installed" {
			t.Errorf("%s: the package is %q", place.name, got)
		}
		m.Run("sh", "-euc", "for dir in run proc; do ! mountpoint --quiet /srv/root/$dir || umount /srv/root/$dir; done")
	}
	const top = "/srv/tree"
	m.Run("sh", "-euc", `mkdir -p "$1/etc" "$1/var/lib/dpkg/info" "$1/var/lib/dpkg/updates"
touch "$1/var/lib/dpkg/status" "$1/etc/passwd" "$1/etc/group"`, "sh", top)
	elsewhere := []string{"--root=" + top, "--force-script-chrootless", "--force-depends"}
	m.dpkg(append(elsewhere, "--install", m.deb)...)
	if user := m.Run("cat", top+"/etc/passwd"); !strings.HasPrefix(user, "nametap:x:1337:1337:") {
		t.Errorf("the users of the directory are %q", user)
	}
	m.dpkg(append(elsewhere, "--purge", "nametap")...)
	if left := m.Run("sh", "-c", "cat $1/etc/passwd $1/etc/group; ls $1/var/lib; find $1 -path '*nametap*'", "sh", top); left != "dpkg\n" {
		t.Errorf("left in the directory:\n%s", left)
	}
	if after := state(); after != before {
		t.Errorf("the machine is\n%s\nbefore:\n%s", after, before)
	}
}

// TestDebNumbersTaken installs the package where others have the numbers 1337. The package says which settings the agent
// needs. With them, the queries of these others are captured. P14.
func TestDebNumbersTaken(t *testing.T) {
	m := bootDeb(t)
	for name, create := range map[string]string{
		"user":  "groupadd --gid 2000 app && useradd --uid 1337 --gid 2000 app",
		"group": "groupadd --gid 1337 app && useradd --uid 2000 --gid 1337 app",
	} {
		m.Run("sh", "-euc", create)
		said, err := m.Try("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--install", m.deb)
		var settings []string
		for line := range strings.Lines(said) {
			if strings.HasPrefix(line, "NAMETAP_CAPTURE_AGENT_") {
				settings = append(settings, strings.TrimSpace(line))
			}
		}
		if err != nil || len(settings) != 2 {
			t.Fatalf("%s: %v, or no settings in:\n%s", name, err, said)
		}
		m.enable(settings...)
		lookup := m.Run("setpriv", "--reuid=app", "--regid=app", "--clear-groups", "getent", "ahostsv4", lab.Mesh)
		if !strings.HasPrefix(lookup, lab.MeshIP+" ") {
			t.Errorf("%s: a program of the other user gets %q, want %s", name, lookup, lab.MeshIP)
		}
		wantNames(t, m.Machine, map[string]string{"other.example.org": lab.NamedIP})
		m.dpkg("--purge", "nametap")
		if users := m.Run("cat", "/etc/passwd", "/etc/group"); strings.Contains(users, "nametap") || strings.Count(users, "app:x:") != 2 {
			t.Errorf("%s: after the purge, the users and groups are:\n%s", name, users)
		}
		m.Run("sh", "-c", "userdel app; groupdel app || true")
	}
}

// replaceInstallation returns the commands of docs/packages.md that remove an installation of `make install`.
func replaceInstallation(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(lab.Repository(), "docs/packages.md"))
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

// TestDebOverMakeInstall installs the package over an agent of `make install`, which systemd and the shell prefer. The
// package says so, and its purge leaves that agent, its state and its user. After the commands of docs/packages.md the
// package is in use. P15.
func TestDebOverMakeInstall(t *testing.T) {
	m := bootDeb(t)
	m.Install()
	m.Start()
	install := func() {
		t.Helper()
		said, err := m.Try("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--force-confold", "--install", m.deb)
		if err != nil || !strings.Contains(said, "this package is not in use") || !strings.Contains(said, "/usr/local/lib/systemd/system/nametap.service") {
			t.Errorf("dpkg --install: %v\n%s", err, said)
		}
	}
	state := func() string { return running(m.Machine) + m.Net.Rules() + m.Lookup(lab.Mesh) }
	before := state()
	install()
	if after := state(); after != before {
		t.Errorf("after the installation:\n%s\nbefore:\n%s", after, before)
	}
	m.dpkg("--purge", "nametap")
	if after := state(); after != before {
		t.Errorf("after the purge:\n%s\nbefore:\n%s", after, before)
	}
	if got := m.Run("id", "nametap"); !strings.HasPrefix(got, "uid=1337(nametap) gid=1337(nametap)") {
		t.Errorf("the user is %s", got)
	}
	m.Run("ls", "/var/lib/nametap")

	install()
	m.Configure()
	m.Run("sh", "-euxc", replaceInstallation(t))
	m.AwaitMesh()
	if got := program(m.Machine); got != "/usr/bin/nametap" {
		t.Errorf("nametap.service runs %s", got)
	}
	if left := m.Run("find", "/usr/local", "(", "-name", "*nametap*", "-o", "-name", "back-off", ")"); left != "" {
		t.Errorf("left in /usr/local:\n%s", left)
	}
	m.dpkg("--purge", "nametap")
	wantNotCaptured(t, m.Machine)
	m.Run("id", "nametap") // the package has not made the user
}

// TestRPM installs, upgrades and removes the rpm, as TestDeb and TestDebUpgrades do with the deb. The removal leaves only
// the settings, the state and the user. P2, P3, P4.
func TestRPM(t *testing.T) {
	m := lab.Boot(t, lab.Packages("rpm"))
	content, err := build("rpm", "nametap-[0-9]*.x86_64.rpm")
	if err != nil {
		t.Fatal(err)
	}
	const path = "/var/tmp/nametap.rpm"
	m.Write(path, string(content))
	before := stateOf(m)
	rpm := func(args ...string) { m.Run("rpm", append([]string{"--nodeps", "--force-debian"}, args...)...) }
	rpm("--install", path)
	for _, unit := range lab.Units() {
		if state, _ := m.Try("systemctl", "is-enabled", unit); state != "disabled\n" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	if got := m.Net.Rules(); got != before["rules"] {
		t.Errorf("rules:\n%s", got)
	}
	m.Configure("NAMETAP_CAPTURE_FAIL_OPEN=false")
	settings := m.Read("/etc/default/nametap")
	m.Systemctl("enable")
	m.Systemctl("start")
	m.AwaitMesh()
	tr := startTraffic(t, m)
	process := running(m)
	rpm("--upgrade", "--force", path)
	if running(m) == process {
		t.Error("the upgrade has not replaced the agent")
	}
	tr.more(time.Second)
	tr.none(load.Right)
	if got := m.Read("/etc/default/nametap"); got != settings {
		t.Errorf("/etc/default/nametap has %q", got)
	}
	rpm("--erase", "nametap")
	// The directories of the shells belong to a package of an rpm distribution.
	m.Run("sh", "-euc", `rm -r /var/lib/nametap /etc/default/nametap.rpmsave /root/.rpmdb
userdel nametap
find /usr/share/fish /usr/share/zsh -type d -empty -delete`)
	stateOf(m).compare(t, before)
}
