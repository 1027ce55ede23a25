// Package iptables_test tests package iptables with the tools and a kernel, in network namespaces. Without root, or without the
// tools, the tests are skipped.
package iptables_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// The other processes of a test (an agent, nameservers, an apply that is killed) also run
// this binary.
const (
	envPeer  = "NAMETAP_TEST_PEER"  // run as a peer
	envApply = "NAMETAP_TEST_APPLY" // apply rules of this backend, and end
)

// outside is the network namespace in which tests must not change rules.
var outside = networkNamespace()

// networkNamespace returns the name of the calling thread's network namespace.
func networkNamespace() string {
	link, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		panic(err)
	}
	return link
}

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(envPeer) != "":
		runPeer()
		os.Exit(0)
	case os.Getenv(envApply) != "":
		os.Exit(applyAndEnd(iptables.Backend(os.Getenv(envApply))))
	}
	wait.Main(m)
}

// self returns a command that runs this binary with a variable set. It uses /proc, because
// another user may not be able to enter the directory of the binary.
func self(variable, value string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	// The race detector waits 1 s at each exit, for reports of other threads.
	cmd.Env = append(os.Environ(), variable+"="+value, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	return cmd
}

// applyAndEnd applies the default rules. If that fails, it prints the error.
func applyAndEnd(backend iptables.Backend) int {
	cfg := iptables.DefaultConfig()
	cfg.Backend = backend
	capture, err := iptables.New(cfg, nil)
	if err == nil {
		err = capture.Apply(context.Background())
	}
	if err == nil {
		return 0
	}
	fmt.Println("apply:", err)
	return 1
}

// output runs a command in the lab, and returns its output and whether it failed.
func (l *lab) output(cmd *exec.Cmd) (string, bool) {
	l.t.Helper()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := l.ns.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		l.t.Fatalf("running %s: %v", cmd, err)
	}
	return out.String(), err != nil
}
