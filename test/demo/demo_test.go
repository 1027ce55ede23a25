// Package demo tests what `make run` shows in a network namespace.
package demo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// binaries are the programs of the demo, which must be in one directory.
var binaries = process.Of("nametap", "nametap-demo")

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	defer binaries.Remove()
	return m.Run()
}

// captured is what the tour shows of capture, which is switched off and on.
const captured = "  `nametap agent --capture --egress`, ISTIO_META_DNS_CAPTURE: \"false\"" + nameserver +
	"  the mesh config changes to ISTIO_META_DNS_CAPTURE: \"true\"" + mesh + `      mysql-instance1.us-east-1.rds.amazonaws.com: 240[.\d]+:3306: this is mysql-instance1
      mysql-instance2.us-east-1.rds.amazonaws.com: 240[.\d]+:3306: this is mysql-instance2
`

// What the client gets if the nameserver answers, and if the agent does.
const (
	nameserver = "\n      cart: no such host\n      www.example.org: 2001:db8::80, 203.0.113.80\n"
	mesh       = "\n      cart: 10.96.10.12\n      www.example.org: 2001:db8::80, 203.0.113.80\n"
)

// TestTour runs the demo as root and as another user, from a directory with a space in its name.
func TestTour(t *testing.T) {
	for _, test := range []struct {
		name string
		uid  uint32
	}{{"root", 0}, {"another user", 65534}} {
		t.Run(test.name, func(t *testing.T) {
			d := newDemo(t, test.uid)
			if test.uid != 0 {
				d.needUserNamespaces()
			}
			if err := d.cmd.Run(); err != nil || d.stderr.Len() > 0 {
				t.Errorf("%v, stderr:\n%s", err, &d.stderr)
			}
			if !regexp.MustCompile(captured).Match(d.stdout.Bytes()) {
				t.Errorf("want in the tour:\n%s\ngot:\n%s", captured, &d.stdout)
			}
			d.checkNothingLeft()
		})
	}
}

// TestInterrupt ends the demo while it shows capture.
func TestInterrupt(t *testing.T) {
	for _, at := range []string{"ISTIO_META_DNS_CAPTURE", "cart: no such host", "cart: 10.96.10.12"} {
		t.Run(at, func(t *testing.T) {
			d := newDemo(t, 0)
			d.cmd.Stdout = nil
			output, err := d.cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := d.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			for b := make([]byte, 1); !strings.Contains(d.stdout.String(), at); d.stdout.Write(b) {
				if _, err := output.Read(b); err != nil {
					t.Fatalf("%v after:\n%s", err, &d.stdout)
				}
			}
			if err := d.cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			if err := d.cmd.Wait(); err != nil {
				t.Errorf("%v, stderr:\n%s", err, &d.stderr)
			}
			d.checkNothingLeft()
		})
	}
}

// TestWithoutNamespaces runs the demo where no namespace can be made: it says what to do, and goes on.
func TestWithoutNamespaces(t *testing.T) {
	d := newDemo(t, 0)
	d.needUserNamespaces()
	d.cmd.Args = []string{"unshare", "--user", "--map-root-user", "sh", "-c",
		`echo 0 >/proc/sys/user/max_net_namespaces && exec "$0" --once`, d.cmd.Path}
	var err error
	if d.cmd.Path, err = exec.LookPath("unshare"); err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Run(); err != nil || d.stderr.Len() > 0 {
		t.Errorf("%v, stderr:\n%s", err, &d.stderr)
	}
	const want = "  left out on this machine: no network namespace (no space left on device)"
	if text := d.stdout.String(); !strings.Contains(text, want) || !strings.Contains(text, "A live edit") {
		t.Errorf("want %q and the next section, got:\n%s", want, text)
	}
}

// A demo is a run of nametap-demo.
type demo struct {
	tb             testing.TB
	cmd            *exec.Cmd
	dir            string // for its temporary files
	stdout, stderr bytes.Buffer
	rules          string // of this network namespace
}

// newDemo prepares a run as a user. It skips the test if this user is not root.
func newDemo(t *testing.T, uid uint32) *demo {
	t.Helper()
	if os.Geteuid() != 0 {
		leftout.Test(t, "%s, it needs root", t.Name())
	}
	netns.Need(t, "ip", "iptables-save", "unshare")
	dir, err := os.MkdirTemp("", "nametap demo ") //nolint:usetesting // another user cannot read t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	programs := filepath.Join(dir, "programs")
	if err := os.CopyFS(programs, os.DirFS(binaries.Dir(t))); err != nil {
		t.Fatal(err)
	}
	d := &demo{tb: t, dir: filepath.Join(dir, "tmp"), rules: ownRules(t)}
	for _, path := range []string{dir, d.dir} {
		if err := os.MkdirAll(path, 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o777); err != nil { //nolint:gosec // another user writes there
			t.Fatal(err)
		}
	}
	d.cmd = exec.Command(filepath.Join(programs, "nametap-demo"), "--once") //nolint:gosec // a program of this repository
	d.cmd.Dir, d.cmd.Env = dir, []string{"PATH=/usr/bin:/bin", "TMPDIR=" + d.dir}
	d.cmd.Stdout, d.cmd.Stderr = &d.stdout, &d.stderr
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return d
}

// needUserNamespaces skips the test unless the kernel lets users make network namespaces.
func (d *demo) needUserNamespaces() {
	d.tb.Helper()
	cmd := exec.Command("unshare", "--user", "--map-root-user", "--net", "ip", "link", "set", "lo", "up")
	cmd.SysProcAttr = d.cmd.SysProcAttr
	if output, err := cmd.CombinedOutput(); err != nil {
		leftout.Test(d.tb, "%s, it needs user namespaces: %v: %s", d.tb.Name(), err, output)
	}
}

// checkNothingLeft checks that the demo has left no process, no file and no rule.
func (d *demo) checkNothingLeft() {
	d.tb.Helper()
	wait.Until(d.tb, "no process of the demo is left", func() bool {
		exes, err := filepath.Glob("/proc/[0-9]*/exe")
		if err != nil {
			d.tb.Fatal(err)
		}
		for _, exe := range exes {
			if target, err := os.Readlink(exe); err == nil && strings.HasPrefix(target, filepath.Dir(d.dir)) {
				return false
			}
		}
		return true
	})
	if left, err := os.ReadDir(d.dir); err != nil || len(left) > 0 {
		d.tb.Errorf("left in %s: %v, %v", d.dir, left, err)
	}
	if rules := ownRules(d.tb); rules != d.rules {
		d.tb.Errorf("rules before:\n%s\nand after:\n%s", d.rules, rules)
	}
}

// ownRules returns the rules of this network namespace.
func ownRules(tb testing.TB) string {
	tb.Helper()
	output, err := exec.Command("iptables-save").CombinedOutput()
	if err != nil {
		tb.Fatalf("%v\n%s", err, output)
	}
	return regexp.MustCompile(`(?m)^#.*\n|\[\d+:\d+\]`).ReplaceAllString(string(output), "")
}
