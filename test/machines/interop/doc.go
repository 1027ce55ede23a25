// Package interop has only tests. They run nametap's agent with an unmodified istiod, whose objects come from a real API
// server, and compare what the agent knows and answers with what istiod says. They run
// nametap-discovery and its webhook with the API server, too. `make interop` runs them.
//
//   - interop_test.go: hosts for agents, tokens, loads; injected_test.go: nametap-discovery as the manifests have it;
//   - istiod_test.go: agents of istiod; random_test.go: nametap-discovery beside istiod; roles_test.go: its rights;
//   - webhook_test.go: pods that it injects; chart_test.go: its chart;
//   - scale_test.go: figures with many Services and agents.
//
// Each test has a control plane of its own, which its subtests share.
package interop
