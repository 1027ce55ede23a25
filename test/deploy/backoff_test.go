package deploy

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// V2: the first starts do not wait, and each is counted. After one that has failed, rules are removed that
// the kernel does not end by itself.
func TestBackOffFirstStarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	removal := ""
	for _, want := range []string{"1\n", "2\n", "3\n", "4\n", "5\n"} {
		if said := output(t, command(t, []string{"RUNTIME_DIRECTORY=" + dir}, "deploy/systemd/back-off", "/bin/echo", "running")); said != removal+"running\n" {
			t.Errorf("%q", said)
		}
		removal = "capture remove --after-agent --unless-leased\n"
		if got := read(t, filepath.Join(dir, "starts")); got != want {
			t.Errorf("%q starts, want %q", got, want)
		}
	}
}

// V2: after many starts that have failed, back-off waits 10 s and says why. A signal of systemd
// ends the wait, and the next start does not wait. In journald these are warnings.
func TestBackOffIsStopped(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		starts string
		signal syscall.Signal
	}{"failed": {"8\n", syscall.SIGUSR1}, "damaged": {"x", syscall.SIGUSR1}, "stop": {"8\n", syscall.SIGTERM}} {
		t.Run(name, func(t *testing.T) {
			dir, said := t.TempDir(), testlog.New(t)
			write(t, filepath.Join(dir, "starts"), test.starts)
			write(t, filepath.Join(dir, "failure"), "the port is taken\n")
			long := filepath.Join(t.TempDir(), "sleep") // the machine may stand still
			write(t, long, "#!/bin/sh\n: >\"$0.runs\"\nexec /bin/sleep 300 >/dev/null 2>&1\n")
			output(t, command(t, nil, "chmod", "755", long))
			cmd := command(t, []string{"RUNTIME_DIRECTORY=" + dir, "JOURNAL_STREAM=8:9", "PATH=" + filepath.Dir(long) + ":" + os.Getenv("PATH")}, "deploy/systemd/back-off", "/bin/echo", "running")
			cmd.Stdout, cmd.Stderr = said, said
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			wait.Until(t, "it says why it waits", func() bool {
				_, err := os.Stat(long + ".runs")
				return err == nil && said.Count("<4>waiting for 10 s") == 1 && said.Count("<4>the port is taken") == 1
			})
			if err := cmd.Process.Signal(test.signal); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil || said.Count("running") > 0 {
				t.Errorf("%v\n%s", err, said)
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
				t.Errorf("files are left: %v, %v", entries, err)
			}
		})
	}
}

// V2: a missing program is the reason that the next start shows.
func TestBackOffMissingProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := command(t, []string{"RUNTIME_DIRECTORY=" + dir}, "deploy/systemd/back-off", "/no/such/nametap", "agent")
	if err := cmd.Run(); err == nil {
		t.Error("no error")
	}
	if got := read(t, filepath.Join(dir, "failure")); !strings.Contains(got, "/no/such/nametap is missing") {
		t.Errorf("%q", got)
	}
	output(t, command(t, []string{"RUNTIME_DIRECTORY=" + dir}, "deploy/systemd/back-off", "/bin/true"))
	if _, err := os.Stat(filepath.Join(dir, "failure")); !os.IsNotExist(err) {
		t.Errorf("the reason is still there: %v, want %v", err, fs.ErrNotExist)
	}
}
