// Command istiod is Istio's control plane and Istio's agent, both unmodified: "istiod
// discovery …" is pilot-discovery, "istiod agent …" is pilot-agent. It is a module of its own
// because of Istio's dependencies, and because one process cannot have two generated packages
// for the same protobuf messages.
package main

import (
	"os"
	"slices"

	meshconfig "istio.io/api/mesh/v1alpha1"
	agent "istio.io/istio/pilot/cmd/pilot-agent/app"
	discovery "istio.io/istio/pilot/cmd/pilot-discovery/app"
	istioagent "istio.io/istio/pkg/istio-agent"
	"istio.io/istio/pkg/security"
	"istio.io/istio/security/pkg/nodeagent/sds"
)

func main() {
	command := discovery.NewRootCommand()
	if len(os.Args) > 1 && os.Args[1] == "agent" {
		os.Args = slices.Delete(os.Args, 1, 2)
		command = agent.NewRootCommand(func(options *security.Options, secrets security.SecretManager, keys *meshconfig.PrivateKeyProvider) istioagent.SDSService {
			return sds.NewServer(options, secrets, keys)
		})
	}
	if err := command.Execute(); err != nil {
		os.Exit(1)
	}
}
