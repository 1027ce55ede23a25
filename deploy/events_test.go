package deploy

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// TestEvents checks that tools/test-events ends with 1 only if the events name a failure for each failure of
// Go. Failed tests run again then, and another failure must not be forgotten.
func TestEvents(t *testing.T) {
	t.Parallel()
	netns.Need(t, "tee", "grep", "mktemp")
	const (
		list  = `*" list "*) echo example.com/a; echo example.com/nametap/test ;;`
		event = `echo '{"Action":"fail","Package":"b"}'; exit 1 ;;`
	)
	for _, c := range []struct {
		cases string
		want  int
	}{
		{list, 0},
		{list + `*"tools/image test"*) ` + event, 1},
		{list + `*"tools/image test"*) exit 1 ;;`, 2},
		{list + `*"tools/image test"*) exit 1 ;; *) ` + event, 2},
		{`*" list "*) echo example.com/a; exit 1 ;;`, 2},
	} {
		fake := filepath.Join(t.TempDir(), "go")
		write(t, fake, "#!/bin/sh\ncase \" $*\" in\n"+c.cases+"\nesac\n")
		output(t, command(t, nil, "chmod", "755", fake))
		text, err := command(t, []string{"GO=" + fake, "RACE="}, "../tools/test-events").Output()
		got := 0
		if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
			got = failed.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if got != c.want || strings.Contains(c.cases, "fail") != strings.Contains(string(text), "fail") {
			t.Errorf("%s: ends with %d, want %d, and prints\n%s", c.cases, got, c.want, text)
		}
	}
}
