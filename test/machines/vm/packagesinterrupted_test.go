package vm_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
	"github.com/nametap/nametap/test/machines/vm"
)

// otherListeners makes a package of another version, whose nametap.socket has other listeners.
func otherListeners(t *testing.T, deb string) string {
	t.Helper()
	changed := filepath.Join(t.TempDir(), "nametap_9.9.9-1_amd64.deb")
	const script = `dpkg-deb --raw-extract "$1" "$2"
sed -i 's/^Version: .*/Version: 9.9.9-1/' "$2/DEBIAN/control"
sed -i 's/^\(Listen.*\)=127.0.0.1:/\1=0.0.0.0:/; s/^\(Listen.*\)=\[::1\]:/\1=[::]:/' "$2/usr/lib/systemd/system/nametap.socket"
dpkg-deb --root-owner-group -Znone --build "$2" "$3"`
	repack := exec.CommandContext(t.Context(), "sh", "-euc", script, "sh", deb, filepath.Join(t.TempDir(), "deb"), changed)
	if output, err := repack.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", repack, err, output)
	}
	return changed
}

// killed replaces a command of the maintainer scripts by one that kills the script that calls it for the nth
// time, after or before the command.
func killed(m *vm.Machine, command string, nth int, after bool) {
	const script = `#!/bin/sh
echo >>/run/calls
[ "$(wc -l </run/calls)" = %d ] || exec /usr/bin/%s "$@"
! %t || /usr/bin/%s "$@"
kill -KILL $PPID
`
	path := "/usr/local/bin/" + command
	m.Write(path, fmt.Sprintf(script, nth, command, after, command))
	m.Run("chmod", "755", path)
	m.Run("rm", "-f", "/run/calls")
}

// TestDebInterrupted kills the maintainer scripts of an upgrade, which changes the listeners, at each of their
// calls of systemctl. `dpkg --configure -a` completes the upgrade, and the agent answers. P3.
func TestDebInterrupted(t *testing.T) {
	m := vm.Boot(t)
	deb := buildDeb(t, vm.Repository(), "0.1.0")
	debs := []string{put(t, m, otherListeners(t, deb)), put(t, m, deb)}
	dpkg(m, "--install", debs[1])
	enable(m, "")
	round := 0
	for _, command := range []string{"systemctl", "deb-systemd-invoke"} {
		for _, after := range []bool{false, true} {
			for nth := 1; ; nth++ {
				killed(m, command, nth, after)
				_, err := m.Try("env", "DEBIAN_FRONTEND=noninteractive", "dpkg", "--force-confold", "--install", debs[round%2])
				m.Run("rm", "/usr/local/bin/"+command)
				calls := strings.Count(m.Read("/run/calls"), "\n")
				dpkg(m, "--configure", "-a")
				if version := m.Run("dpkg-query", "--show", "--showformat=${Version}", "nametap"); !strings.Contains(debs[round%2], "_"+version+"_") {
					dpkg(m, "--install", debs[round%2]) // the unpacking was interrupted, too
				}
				when := fmt.Sprintf("killed at call %d of %s, after it: %v", nth, command, after)
				t.Logf("%s: %v", when, err)
				m.AwaitMesh()
				address := []string{"0.0.0.0:15053", "127.0.0.1:15053"}[round%2]
				listeners := m.Run("ss", "--no-header", "--listening", "--udp", "--ipv4", "--numeric", "--processes", "sport", "=", ":15053")
				if !strings.Contains(listeners, address) || !strings.Contains(listeners, `"systemd"`) || !strings.Contains(listeners, `"nametap"`) {
					t.Errorf("%s: want %s in systemd and nametap:\n%s", when, address, listeners)
				}
				if left, _ := m.Try("sh", "-c", "ls /run/nametap-listeners /run/nametap-stopped 2>/dev/null"); left != "" {
					t.Errorf("%s: left:\n%s", when, left)
				}
				round++
				if calls < nth {
					break
				}
			}
		}
	}
}

// TestDebUnpacked kills the agent while a package with other listeners is unpacked, and not configured. The
// next agent answers from the sockets that systemd holds. P3, V1.
func TestDebUnpacked(t *testing.T) {
	m := vm.Boot(t)
	deb := buildDeb(t, vm.Repository(), "0.1.0")
	other := put(t, m, otherListeners(t, deb))
	dpkg(m, "--install", put(t, m, deb))
	enable(m, "")
	dies := func() {
		t.Helper()
		before := running(m)
		m.Run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "nametap.service")
		wait.Until(t, "another agent runs", func() bool {
			now := running(m)
			return now != before && strings.Contains(now, "ActiveState=active")
		})
		m.AwaitMesh()
	}
	dpkg(m, "--unpack", other)
	dies()
	if sockets := m.Run("ss", "--no-header", "--listening", "--udp", "--ipv4", "--numeric", "--processes", "sport", "=", ":15053"); !strings.Contains(sockets, `"systemd"`) {
		t.Errorf("systemd has no sockets:\n%s", sockets)
	}
	// After a reload by another program, systemd has none. The agent opens its own.
	m.Run("systemctl", "daemon-reload")
	dies()
	tr := startTraffic(t, m)
	tr.more(3 * time.Second) // longer than the lease of the rules
	if mesh, forwarded := tr.stop(load.Right); mesh+forwarded > 0 {
		t.Errorf("%d queries for the mesh name and %d for others have no right answer", mesh, forwarded)
	}
	if journal := m.Journal("nametap.service"); !strings.Contains(journal, "systemctl restart nametap.socket") {
		t.Error("the agent does not say what to do")
	}
	dpkg(m, "--configure", "nametap")
	m.Run("systemctl", "restart", "nametap.socket")
	m.AwaitMesh()
}

// TestDebFirstBoot boots a copy of an image with the package for the first time. systemd does not enable the
// agent, and leaves it enabled in an image where it is. P4.
func TestDebFirstBoot(t *testing.T) {
	m := vm.Boot(t)
	rules := m.Net.Rules()
	dpkg(m, "--install", put(t, m, buildDeb(t, vm.Repository(), "0.1.0")))
	m.Write("/etc/machine-id", "uninitialized\n")
	m.Reboot()
	if id := m.Read("/etc/machine-id"); id == "uninitialized\n" {
		t.Fatal("it was not a first boot")
	}
	for _, unit := range vm.Units() {
		if state, _ := m.Try("systemctl", "is-enabled", unit); state != "disabled\n" {
			t.Errorf("%s is %s", unit, state)
		}
	}
	if got := m.Net.Rules(); got != rules {
		t.Errorf("rules:\n%s", got)
	}
	enable(m, "")
	m.Write("/etc/machine-id", "uninitialized\n")
	m.Reboot()
	m.AwaitMesh()
}

// TestDebElsewhere installs and purges the package in a directory, without chroot, on a machine with an
// agent. Only the directory changes. P13.
func TestDebElsewhere(t *testing.T) {
	m := vm.Boot(t)
	path := put(t, m, buildDeb(t, vm.Repository(), "0.1.0"))
	dpkg(m, "--install", path)
	enable(m, "")
	const top = "/srv/tree"
	m.Run("sh", "-euc", `mkdir -p "$1/etc" "$1/var/lib/dpkg/info" "$1/var/lib/dpkg/updates"
touch "$1/var/lib/dpkg/status" "$1/etc/passwd" "$1/etc/group"`, "sh", top)
	// state returns the machine's state, without the directory's.
	state := func() string {
		return running(m) + m.Net.Rules() + m.Run("cat", "/etc/passwd", "/etc/group") + m.Run("systemctl", "is-enabled", "nametap.service", "nametap.socket") +
			m.Run("sh", "-c", "ls -d /var/lib/nametap /var/lib/nametap-made /run/nametap*")
	}
	before := state()
	elsewhere := []string{"--root=" + top, "--force-script-chrootless", "--force-depends"}
	for range 2 {
		dpkg(m, append(elsewhere, "--install", path)...)
		if user := m.Run("cat", top+"/etc/passwd"); !strings.HasPrefix(user, "nametap:x:1337:1337:") {
			t.Errorf("the users of the directory are %q", user)
		}
	}
	dpkg(m, append(elsewhere, "--purge", "nametap")...)
	if left := m.Run("sh", "-c", "cat $1/etc/passwd $1/etc/group; ls $1/var/lib; find $1 -path '*nametap*'", "sh", top); left != "dpkg\n" {
		t.Errorf("left in the directory:\n%s", left)
	}
	if after := state(); after != before {
		t.Errorf("the machine is\n%s\nbefore:\n%s", after, before)
	}
}

// TestDebMasked removes the package while the agent runs and its unit is masked. Nothing is left but the
// mask. P2.
func TestDebMasked(t *testing.T) {
	m := vm.Boot(t)
	rules := m.Net.Rules()
	dpkg(m, "--install", put(t, m, buildDeb(t, vm.Repository(), "0.1.0")))
	enable(m, "")
	m.Run("systemctl", "mask", "nametap.service")
	dpkg(m, "--remove", "nametap")
	if left := m.Run("find", "/etc/systemd", "-name", "nametap*"); left != "/etc/systemd/system/nametap.service\n" {
		t.Errorf("left in /etc/systemd:\n%s", left)
	}
	if processes, _ := m.Try("pgrep", "--list-full", "nametap"); processes != "" || m.Net.Rules() != rules {
		t.Errorf("processes:\n%s\nrules:\n%s", processes, m.Net.Rules())
	}
}
