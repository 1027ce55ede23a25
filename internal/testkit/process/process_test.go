package process_test

import (
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
)

func TestChildren(t *testing.T) {
	child := exec.CommandContext(t.Context(), "sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if got := process.Children(os.Getpid()); !slices.Equal(got, []int{child.Process.Pid}) {
		t.Errorf("children %v, want %d alone", got, child.Process.Pid)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // reports the kill
	if got := process.Children(os.Getpid()); len(got) != 0 {
		t.Errorf("children %v after the end of the only one", got)
	}
}

func TestBuildFails(t *testing.T) {
	if dir, err := process.Build("no-such-command"); err == nil || dir != "" {
		t.Errorf("got %q, %v, want an error", dir, err)
	}
}
