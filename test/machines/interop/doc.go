// Package interop has only tests. They run nametap's agent with an unmodified istiod, whose
// objects come from a real API server, and compare what the agent knows and answers with what
// istiod and Istio's own agent say. `make interop` runs them.
//
//   - cluster_test.go: a Kubernetes control plane; objects_test.go: its objects;
//   - clusters_test.go: two of them, and nametap-discovery;
//   - injector_test.go: nametap-discovery as a webhook;
//   - istiod_test.go: istiods on it;
//   - machine_test.go: a host with a nameserver, for agents;
//   - agent_test.go: nametap's agent; istioagent_test.go: Istio's agent;
//   - daemon_test.go: a running program, and its log; figures_test.go: its memory and processor time;
//   - population_test.go: 10,000 Services; writer_test.go: a client that writes them.
//
// Each test has a control plane of its own. The programs are built from the modules in
// ../peers. Everything runs in network namespaces and ends with the test.
package interop
