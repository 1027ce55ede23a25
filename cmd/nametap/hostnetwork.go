package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"
)

// hostsFile is what kubelet writes for each pod.
const hostsFile = "/etc/hosts"

// kubeletsHostNetwork begins that file in a pod that has its node's network.
const kubeletsHostNetwork = "# Kubernetes-managed hosts file (host network)."

// ownNetwork returns an error if this process is in a pod that has its node's network:
// the rules would capture the DNS of the whole node, and stay when the pod has ended. On
// a VM neither sign is there, so its DNS is captured.
func (o *options) ownNetwork() error {
	if o.hostNetwork {
		return nil
	}
	sign, err := o.nodesNetwork()
	switch {
	case err != nil:
		return fmt.Errorf("capture: whether this pod has the network of its node cannot be told, so nothing is captured; --%s captures in either case: %w", hostNetworkFlag, err)
	case sign == "":
		return nil
	}
	return fmt.Errorf("capture: this pod has the network of its node (hostNetwork: %s), so the DNS of the whole node would be captured, also after the pod: give the pod its own network, or --%s if that is meant", sign, hostNetworkFlag)
}

// nodesNetwork returns the sign that this process has its node's network, empty if there
// is none.
func (o *options) nodesNetwork() (sign string, err error) {
	if o.hostIP != "" {
		own, err := onInterface(o.hostIP)
		switch {
		case own || sameAddress(o.hostIP, o.instanceIP.String()):
			return "HOST_IP " + o.hostIP + " is its own address", nil
		case err != nil:
			return "", err
		}
	}
	says, err := kubeletSaysHostNetwork(hostsFile)
	if says {
		sign = "kubelet says so in " + hostsFile
	}
	return sign, err
}

// sameAddress reports whether two texts are one address.
func sameAddress(a, b string) bool {
	first, err1 := netip.ParseAddr(a)
	second, err2 := netip.ParseAddr(b)
	return err1 == nil && err2 == nil && first.Unmap() == second.Unmap()
}

// onInterface reports whether an address is one of this network namespace.
func onInterface(address string) (bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("reading the addresses of this network namespace: %w", err)
	}
	for _, a := range addrs {
		if prefix, ok := a.(*net.IPNet); ok && sameAddress(prefix.IP.String(), address) {
			return true, nil
		}
	}
	return false, nil
}

// kubeletSaysHostNetwork reports whether a file is what kubelet writes for a pod that has
// its node's network. A file that is not there says nothing.
func kubeletSaysHostNetwork(path string) (bool, error) {
	file, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	defer file.Close()
	first, err := bufio.NewReader(file).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return strings.HasPrefix(first, kubeletsHostNetwork), nil
}
