package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kubectl-nametap": main, "kubectl": kubectl})
}

// kubectl prints its arguments, and fails as $FAIL says for the pod $FAILING. `kubectl get` prints $PODS,
// and `kubectl proxy` serves the cluster $CLUSTER.
func kubectl() {
	line := strings.Join(os.Args[1:], " ")
	if slices.Contains(os.Args, "proxy") {
		serveCluster(os.Args[1:])
	}
	if strings.Contains(line, " get pods ") {
		fmt.Fprintln(os.Stderr, "kubectl", line)
		fmt.Println(os.Getenv("PODS"))
	} else {
		fmt.Println("kubectl", line)
	}
	if failing := os.Getenv("FAILING"); failing != "" && strings.Contains(line, failing) {
		os.Exit(3)
	}
}

// TestScripts runs the plugin with a kubectl that prints its arguments.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", Setup: func(e *testscript.Env) error {
		// The race detector would wait for a second at the end of each command.
		e.Setenv("GORACE", "atexit_sleep_ms=0")
		return nil
	}})
}
