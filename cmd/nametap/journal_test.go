package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// TestJournal checks that every line has its priority if the standard error is journald's stream, and no
// prefix if it is not. R8.
func TestJournal(t *testing.T) {
	for _, test := range []struct {
		name, format string
		journal      bool
		want         string // of all lines
	}{
		{"journal", "text", true, `^<4>time=.* level=WARN .*\n$`},
		{"journal, JSON", "json", true, `^<4>\{.*"level":"WARN".*\}\n$`},
		{"another stream", "text", false, `^time=.* level=WARN .*\n$`},
	} {
		t.Run(test.name, func(t *testing.T) {
			// It says at level WARN that the rules stay, and does nothing.
			text := stderr(t, test.journal, "capture", "remove", "--after-agent", "--capture-fail-open=false", "--log-format="+test.format)
			if !regexp.MustCompile(test.want).MatchString(text) {
				t.Errorf("the log:\n%s", text)
			}
		})
	}
	t.Run("errors", func(t *testing.T) {
		text := stderr(t, true, "agent", "--xds-addr=nowhere", "--ttl=1ns")
		if lines := strings.Count(text, "\n"); lines != 3 || lines != strings.Count("\n"+text, "\n<3>") {
			t.Errorf("%d lines:\n%s", lines, text)
		}
	})
}

// stderr returns what a command writes to the standard error. If journal is true, the environment says that
// it is journald's stream.
func stderr(t *testing.T, journal bool, args ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stderr")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	stream := stat.Ino
	if !journal {
		stream++
	}
	command := exec.CommandContext(t.Context(), "nametap", args...)
	command.Env = []string{"PATH=" + os.Getenv("PATH"), fmt.Sprintf("JOURNAL_STREAM=%d:%d", stat.Dev, stream)}
	command.Stderr = file
	_ = command.Run()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
