package main

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"github.com/nametap/nametap/internal/listen"
)

// hostsFile is a file that kubelet writes for each pod.
const hostsFile = "/etc/hosts"

// inPod is an environment variable that kubelet sets in each container. If it is not set, this process is not in a pod.
const inPod = "KUBERNETES_SERVICE_HOST"

// hostIP is an environment variable with the address of a pod's node. The manifests set it by the downward API.
const hostIP = "HOST_IP"

// kubeletsHostNetwork is the first line of hostsFile in a pod on its node's network.
const kubeletsHostNetwork = "# Kubernetes-managed hosts file (host network)."

// ownNetwork returns an error if this process is in a pod on its node's network. There the
// rules would capture the DNS of the whole node, and stay when the pod has ended. A VM has
// neither HOST_IP nor the file and the variables of kubelet, so its DNS is captured.
func (o *options) ownNetwork() error {
	if o.hostNetwork {
		return nil
	}
	sign, err := o.nodesNetwork()
	switch {
	case err != nil:
		return fmt.Errorf("capture: cannot find out whether this pod has the network of its node; --%s captures "+
			"in any case: %w", hostNetworkFlag, err)
	case sign == "":
		return nil
	}
	return fmt.Errorf("capture: this pod has the network of its node (hostNetwork: %s), so the rules would capture the "+
		"DNS of the whole node, even after the pod has ended: give the pod its own network, or capture the node's "+
		"DNS with --%s", sign, hostNetworkFlag)
}

// nodesNetwork returns a sign that this process has the network of its node, or "" if there is none.
func (o *options) nodesNetwork() (sign string, err error) {
	if text := os.Getenv(hostIP); text != "" {
		node, err := netip.ParseAddr(text)
		if err != nil {
			return "", fmt.Errorf("%s=%.100q: want one IP address", hostIP, text)
		}
		own, err := listen.OnInterface(node)
		switch {
		case own || node.Unmap() == o.instanceIP.Unmap():
			return hostIP + " " + text + " is its own address", nil
		case err != nil:
			return "", err
		}
	}
	text, err := os.ReadFile(hostsFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case strings.HasPrefix(string(text), kubeletsHostNetwork):
		return "kubelet wrote so in " + hostsFile, nil
	}
	return "", err
}
