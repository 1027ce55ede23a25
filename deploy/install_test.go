package deploy

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A fakeDebian is a machine whose apt-get asks the policy, as Debian's tools do before they start a service, and
// then waits until the file "go" exists.
type fakeDebian struct {
	t   *testing.T
	dir string
}

func newFakeDebian(t *testing.T) fakeDebian {
	t.Helper()
	netns.Need(t, "flock", "mkfifo")
	d := fakeDebian{t, t.TempDir()}
	for name, text := range map[string]string{
		"id": "echo 0",
		"apt-get": `[ "$2" = install ] || exit 0
echo "$*" >>"$DIR/installed"
[ -e "$DIR/go" ] || mkfifo "$DIR/fifo"
"$POLICY"
echo "the policy exits with $?" >"$DIR/asked"
[ -e "$DIR/go" ] || read -r line <"$DIR/fifo"`,
	} {
		if err := os.WriteFile(d.path(name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func (d fakeDebian) path(name string) string { return filepath.Join(d.dir, name) }

func (d fakeDebian) exists(name string) bool {
	_, err := os.Stat(d.path(name))
	return err == nil
}

// start starts an installation of commands, in a process group, as a terminal does.
func (d fakeDebian) start(commands ...string) *exec.Cmd {
	d.t.Helper()
	cmd := command(d.t, nil, "../tools/install-missing", commands...)
	cmd.Env = []string{"PATH=" + d.dir + ":" + os.Getenv("PATH"), "DIR=" + d.dir, "POLICY=" + d.path("policy-rc.d")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	return cmd
}

// asked waits until apt-get has asked the policy, and returns its answer.
func (d fakeDebian) asked() string {
	d.t.Helper()
	wait.Until(d.t, "apt-get asks the policy", func() bool { return d.exists("asked") && read(d.t, d.path("asked")) != "" })
	return read(d.t, d.path("asked"))
}

const forbidden = "the policy exits with 101\n"

// TestInstallMissing installs packages. While apt-get runs, the policy of Debian starts no service.
// Afterwards the policy is removed, also one that a killed installation has left. The machine's own
// policy stays.
func TestInstallMissing(t *testing.T) {
	d := newFakeDebian(t)
	write(t, d.path("go"), "")
	run := func(commands ...string) {
		t.Helper()
		if err := d.start(commands...).Wait(); err != nil {
			t.Fatal(err)
		}
	}
	run("sh", "nt-missing", "nsenter-missing")
	if got := read(t, d.path("installed")); !strings.HasSuffix(got, " nt-missing nsenter-missing\n") {
		t.Errorf("apt-get is called with %q", got)
	}
	if got := d.asked(); got != forbidden || d.exists("policy-rc.d") {
		t.Errorf("%q, and afterwards the policy exists: %v", got, d.exists("policy-rc.d"))
	}

	if err := os.Remove(d.path("go")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(d.path("asked")); err != nil {
		t.Fatal(err)
	}
	killed := d.start("nt-missing")
	d.asked()
	d.end(killed, syscall.SIGKILL)
	if !d.exists("policy-rc.d") {
		t.Fatal("a killed installation leaves no policy, so there is nothing to test")
	}
	run("sh") // nothing is missing
	if d.exists("policy-rc.d") {
		t.Error("the policy of a killed installation stays")
	}

	const own = "#!/bin/sh\nexit 104\n"
	if err := os.WriteFile(d.path("policy-rc.d"), []byte(own), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, d.path("go"), "")
	run("nt-missing")
	if got := d.asked(); got != "the policy exits with 104\n" || read(t, d.path("policy-rc.d")) != own {
		t.Errorf("%q, and the machine's policy is now\n%s", got, read(t, d.path("policy-rc.d")))
	}
}

// end ends an installation and its apt-get by a signal, as a terminal does, and checks that it ends by it.
func (d fakeDebian) end(cmd *exec.Cmd, by syscall.Signal) {
	d.t.Helper()
	if err := syscall.Kill(-cmd.Process.Pid, by); err != nil {
		d.t.Fatal(err)
	}
	var ended *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &ended) || ended.Sys().(syscall.WaitStatus).Signal() != by {
		d.t.Errorf("%v, want the end by the signal %v", err, by)
	}
}

// TestInstallMissingInterrupted ends an installation by a signal, and another one that waits for it goes on. No
// policy is left.
func TestInstallMissingInterrupted(t *testing.T) {
	// A shell cannot trap what this process ignores, as it does under nohup.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGHUP)
	t.Cleanup(func() { signal.Reset(syscall.SIGINT, syscall.SIGHUP) })
	for _, by := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(by.String(), func(t *testing.T) {
			d := newFakeDebian(t)
			cmd := d.start("nt-missing")
			if got := d.asked(); got != forbidden {
				t.Error(got)
			}
			waits := d.start("nt-other")
			write(t, d.path("go"), "")
			d.end(cmd, by)
			if err := waits.Wait(); err != nil {
				t.Error(err)
			}
			if got := d.asked(); got != forbidden || d.exists("policy-rc.d") {
				t.Errorf("%q, and afterwards the policy exists: %v", got, d.exists("policy-rc.d"))
			}
			if got := read(t, d.path("installed")); !strings.HasSuffix(got, " nt-other\n") {
				t.Errorf("apt-get is called with %q", got)
			}
		})
	}
}
