// Package lab is where the tests on real machines and with real peers work. It has
//
//   - programs (cache.go, peers.go): nametap's, Debian's, istiod, Kubernetes and Helm, each built once;
//   - a [Place] (place.go): a network namespace with a directory, in which each [Process] (process.go) runs and logs;
//   - a [Client] (ask.go), which asks nameservers, beside package load, which sends many queries and counts losses;
//   - an [Agent] and nametap-discovery in a place (agent.go);
//   - a [Cluster] (cluster.go, objects.go), the control plane of Kubernetes, and an [Istiod] on it (istiod.go);
//   - a [Machine] (machine.go, commands.go, install.go, root.go): a Debian that systemd has booted, with a [World]
//     around it (world.go);
//   - a [Node] (node.go): the namespaces of a machine for kubelet and pods.
//
// Everything ends with its test, also if the test is interrupted. Logs of a test that fails stay.
package lab
