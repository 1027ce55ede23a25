package main

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"nametap-demo": func() { os.Exit(run()) }})
}

// TestScripts runs the real command.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Condition: func(name string) (bool, error) {
			if name != "namespaces" {
				return false, fmt.Errorf("condition %q: want namespaces", name)
			}
			return namespaces(t), nil
		},
		Setup: func(env *testscript.Env) error {
			// The race detector delays the end of every command by a second.
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			return nil
		},
	})
}

// namespaces reports whether this machine allows what the demo needs to show connections to VIPs.
func namespaces(t *testing.T) bool {
	t.Helper()
	command := exec.Command("unshare", "--user", "--map-root-user", "--net", "sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; ip link set lo up && iptables-save -t nat")
	output, err := command.CombinedOutput()
	if err != nil {
		t.Logf("no connections to VIPs: %v\n%s", err, output)
	}
	return err == nil
}
