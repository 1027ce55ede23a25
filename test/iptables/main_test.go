// Package iptables_test tests package iptables with the tools and a kernel, in network namespaces. Without root, or without the
// tools, the tests are skipped.
package iptables_test

import (
	"os"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// envPeer makes this binary run as a peer: an agent or nameservers.
const envPeer = "NAMETAP_TEST_PEER"

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
	if os.Getenv(envPeer) != "" {
		runPeer()
		os.Exit(0)
	}
	wait.Main(m)
}
