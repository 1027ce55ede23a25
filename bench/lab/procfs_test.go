package lab

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		text        string
		pid, parent int
	}{
		{readTestdata(t, "stat.txt"), 25376, 25374},
		{"7 (a) b (c) S 1 7 7 0 -1", 7, 1},
		{"8 (with\nnewline) R 2 8", 8, 2},
	} {
		pid, parent, err := parseStat(c.text)
		if err != nil || pid != c.pid || parent != c.parent {
			t.Errorf("%q: %d, %d, %v; want %d, %d", c.text, pid, parent, err, c.pid, c.parent)
		}
	}
	for _, text := range []string{"", "7", "7 (a)", "7 (a) S", "x (a) S 1", "7 (a) S x"} {
		if pid, parent, err := parseStat(text); err == nil {
			t.Errorf("%q: %d, %d, want an error", text, pid, parent)
		}
	}
}

func TestParseSmaps(t *testing.T) {
	text := readTestdata(t, "smaps_rollup.txt")
	for field, want := range map[string]int{"Rss": 4288 << 10, "Pss": 3045 << 10} {
		if got, err := ParseSize(text, field); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", field, got, err, want)
		}
	}
	if got, err := ParseSize(text, "Nothing"); err == nil {
		t.Errorf("unknown field: %d, want an error", got)
	}
}

// A shell and its child count together, and both have ended after stop.
func TestProcess(t *testing.T) {
	p, err := startProcess(t.Context(), t.TempDir(), Command{
		Name: "sh", Argv: []string{"sh", "-c", "echo started; sleep 60 & wait"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	var pids []int
	err = p.Await(t.Context(), 10*time.Second, func(context.Context) error {
		var err error
		if pids, err = family(p.Pid); err == nil && len(pids) < 2 {
			err = errors.New("no child yet")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if used, err := ProcessorTime(p.Pid); err != nil || used <= 0 {
		t.Errorf("processor time %v, %v", used, err)
	}
	if size, err := Memory(p.Pid); err != nil || size <= 0 {
		t.Errorf("memory %d, %v", size, err)
	}
	p.stop()
	if p.Alive() == nil {
		t.Error("it is alive after stop")
	}
	for _, pid := range pids {
		awaitGone(t, pid)
	}
	if text := p.tail(); text != "started\n" {
		t.Errorf("log %q", text)
	}
}

// awaitGone waits until a killed process has ended or is a zombie.
func awaitGone(t *testing.T, pid int) {
	t.Helper()
	limit := time.After(time.Minute)
	for poll := time.Tick(time.Millisecond); ; {
		if err := unix.Kill(pid, 0); errors.Is(err, unix.ESRCH) || isZombie(pid) {
			return
		}
		select {
		case <-poll:
		case <-limit:
			t.Fatalf("process %d is alive after stop", pid)
		}
	}
}

func isZombie(pid int) bool {
	_, err := Memory(pid)
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH)
}

func TestAwaitReportsTheLog(t *testing.T) {
	p, err := startProcess(t.Context(), t.TempDir(), Command{
		Name: "sh", Argv: []string{"sh", "-c", "echo out of luck >&2; exit 1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	err = p.Await(t.Context(), 10*time.Second, func(context.Context) error { return errors.New("not yet") })
	if err == nil || !contains(err.Error(), "out of luck") {
		t.Errorf("%v, want what it said", err)
	}
}
