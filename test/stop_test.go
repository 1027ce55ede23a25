package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// countTools makes all following commands of the host note which tools of iptables they run, and
// returns a function that returns these notes.
func (v *vm) countTools() (ran func() []string) {
	v.tb.Helper()
	notes := filepath.Join(v.dir, "tools.log")
	if err := os.WriteFile(notes, nil, 0o666); err != nil {
		v.tb.Fatal(err)
	}
	if err := os.Chmod(notes, 0o666); err != nil {
		v.tb.Fatal(err)
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"nft-save", "nft-restore", "legacy-save", "legacy-restore"} {
			name := family + "-" + tool
			path, err := exec.LookPath(name)
			if err != nil {
				v.tb.Fatal(err)
			}
			v.script(name, "#!/bin/sh\necho "+name+" >>"+notes+"\nexec "+path+" \"$@\"\n")
		}
	}
	v.environment = append(v.environment, "PATH="+v.dir+":"+os.Getenv("PATH"))
	return func() []string {
		text, err := os.ReadFile(notes)
		if err != nil {
			v.tb.Fatal(err)
		}
		return strings.Fields(string(text))
	}
}

// TestStopRunsFewTools checks that the end of an agent runs few programs, because each takes long
// on a busy machine, and leaves nothing, with and without rules of other programs.
func TestStopRunsFewTools(t *testing.T) { // V4, K9
	t.Parallel()
	v := newUnitVM(t)
	ran := v.countTools()
	for _, others := range []bool{true, false} {
		if !others {
			v.Exec("nft", "flush", "ruleset")
		}
		before := v.Rules()
		args := slices.Concat([]string{
			"agent", "--xds-addr", v.xds.Addr(), "--xds-plaintext", "--status-addr", statusAddr, "--resolv-conf", v.resolvConf,
		}, v.flags) // no --drain
		a := v.launchCommand(v.command(args...))
		wait.Until(t, "DNS is captured", func() bool { return a.log.Count("DNS is captured") > 0 })
		v.becomes(named, meshIP)
		started := len(ran())
		a.end(terminate)
		tools := ran()[started:]
		// Each family is read, unhooked, read, and later read, removed and read again. Legacy
		// cannot be read here, so that is attempted twice. A check that the installation has made due
		// may read both backends meanwhile.
		if len(tools) > 16+5 && !stoodStill(t) {
			t.Errorf("the end ran %d tools: %v", len(tools), tools)
		}
		if after := v.Rules(); after != before {
			t.Errorf("rules are left:\n%s\nbefore:\n%s", after, before)
		}
	}
}
