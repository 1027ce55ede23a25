// Command istiod is Istio's control plane, unmodified: "istiod discovery …" is pilot-discovery. It is a module of its own because of
// Istio's dependencies, and because one process cannot have two generated packages for the same protobuf messages.
package main

import (
	"os"

	discovery "istio.io/istio/pilot/cmd/pilot-discovery/app"
)

func main() {
	if err := discovery.NewRootCommand().Execute(); err != nil {
		os.Exit(1)
	}
}
