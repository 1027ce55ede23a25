// Package node tests nametap in the pods of a real Kubernetes node: kubelet, containerd, runc,
// the bridge of CNI, kube-proxy and CoreDNS, and an API server with its controllers.
//
// The node runs in namespaces of its own (mount, network, PID, UTS and IPC) with a read-only
// view of the machine's files, so it changes nothing on the machine. Only its cgroups are
// visible on the machine, below one named nt-node-PID.
//
// All checks are subtests of TestNode, which share one node. Each has a namespace of Kubernetes
// and runs the pods of deploy/kubernetes as they are, with containers added that ask and
// record. They run side by side, because most of their time is kubelet's own waiting.
//
// Files: machine_test.go the namespaces and their processes, cgroup_test.go the cgroups,
// cluster_test.go the configuration of Kubernetes, image_test.go the images, api_test.go the
// client of the API, pod_test.go pods for checks, discovery_test.go nametap-discovery as a user installs
// it. The other files have the checks.
package node
