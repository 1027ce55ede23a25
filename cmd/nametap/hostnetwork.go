package main

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
)

const hostNetworkFlag = "host-network"

// hostsFile is what kubelet writes for each pod.
const hostsFile = "/etc/hosts"

// kubeletsHostNetwork begins that file in a pod that has its node's network.
const kubeletsHostNetwork = "# Kubernetes-managed hosts file (host network)."

// ownNetwork returns an error if this process is in a pod that has its node's network:
// the rules would capture the DNS of the whole node, and stay when the pod has ended. On
// a VM neither sign is there, so its DNS is captured.
func (f *captureFlags) ownNetwork(instanceIP string) error {
	if f.hostNetwork {
		return nil
	}
	sign := ""
	switch {
	case f.hostIP != "" && (sameAddress(f.hostIP, instanceIP) || onInterface(f.hostIP)):
		sign = "HOST_IP " + f.hostIP + " is its own address"
	case kubeletSaysHostNetwork(hostsFile):
		sign = "kubelet says so in " + hostsFile
	default:
		return nil
	}
	return fmt.Errorf("capture: this pod has the network of its node (hostNetwork: %s), so the DNS of the whole node would be captured, also after the pod: give the pod its own network, or --%s if that is meant", sign, hostNetworkFlag)
}

// sameAddress reports whether two texts are one address.
func sameAddress(a, b string) bool {
	first, err1 := netip.ParseAddr(a)
	second, err2 := netip.ParseAddr(b)
	return err1 == nil && err2 == nil && first.Unmap() == second.Unmap()
}

// onInterface reports whether an address is one of this network namespace.
func onInterface(address string) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		if prefix, ok := a.(*net.IPNet); ok && sameAddress(prefix.IP.String(), address) {
			return true
		}
	}
	return false
}

// kubeletSaysHostNetwork reports whether a file is what kubelet writes for a pod that has
// its node's network.
func kubeletSaysHostNetwork(path string) bool {
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	return lines.Scan() && strings.HasPrefix(lines.Text(), kubeletsHostNetwork)
}
