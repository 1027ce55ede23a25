// Package node has only tests. They run nametap in the pods of a real Kubernetes node: kubelet, containerd, runc, the bridge
// of CNI, kube-proxy and CoreDNS, and an API server with its controllers.
//
// The node is a lab.Node, so it changes nothing on the machine. All checks are subtests of TestNode, which share one node.
// Each has a namespace of Kubernetes and runs the pods of deploy/kubernetes as they are, with containers added that ask and
// record. They run side by side, because most of their time is kubelet's own waiting.
//
// Files: cluster_test.go the configuration of Kubernetes and the images, pod_test.go pods for checks, node_test.go the
// checks of the manifests' pods, injected_test.go of injected pods.
package node
