package main

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// The ports on which kubelet listens: its API, and /healthz on loopback. Other programs, such as metrics-server,
// use the first port, too.
const (
	kubeletPort       = 10250
	kubeletHealthPort = 10248
)

// nodesNamespace returns a sign that this process is in the network namespace of a node, or "" if there is none. There
// are two signs: kubelet listens in the namespace, or the namespace's interfaces have peers in several other
// namespaces, which are the namespaces of pods. The interfaces of a pod have their peers only in the namespace of the
// node.
func nodesNamespace() (sign string, err error) {
	listening, err := listeningPorts()
	if err != nil {
		return "", err
	}
	if listening[kubeletPort] && listening[kubeletHealthPort] {
		return fmt.Sprintf("kubelet listens on its ports %d and %d", kubeletPort, kubeletHealthPort), nil
	}
	links, err := syscall.NetlinkRIB(unix.RTM_GETLINK, unix.AF_UNSPEC)
	if err != nil {
		return "", fmt.Errorf("reading the interfaces of this network namespace: %w", err)
	}
	peers, err := peerNamespaces(links)
	if len(peers) > 1 {
		sign = fmt.Sprintf("its interfaces have peers in %d other network namespaces", len(peers))
	}
	return sign, err
}

// listeningPorts returns the TCP ports on which any process of this network namespace listens.
func listeningPorts() (map[uint16]bool, error) {
	ports := map[uint16]bool{}
	for _, table := range []string{"tcp", "tcp6"} {
		sockets, err := readSockets(table)
		if err != nil {
			return nil, err
		}
		for _, s := range sockets {
			if s.listens {
				ports[s.addr.Port()] = true
			}
		}
	}
	return ports, nil
}

// peerNamespaces returns the other network namespaces in which interfaces of this namespace have peers. The parameter
// dump has the kernel's netlink messages about all interfaces of this namespace. The keys of the result are the
// kernel's numbers for the other namespaces.
func peerNamespaces(dump []byte) (map[int32]bool, error) {
	messages, err := syscall.ParseNetlinkMessage(dump)
	if err != nil {
		return nil, fmt.Errorf("reading the interfaces of this network namespace: %w", err)
	}
	peers := map[int32]bool{}
	for _, message := range messages {
		if message.Header.Type != unix.RTM_NEWLINK {
			continue
		}
		attributes, err := syscall.ParseNetlinkRouteAttr(&message)
		if err != nil {
			return nil, fmt.Errorf("reading an interface of this network namespace: %w", err)
		}
		for _, attribute := range attributes {
			if attribute.Attr.Type == unix.IFLA_LINK_NETNSID && len(attribute.Value) == 4 {
				peers[int32(binary.NativeEndian.Uint32(attribute.Value))] = true //nolint:gosec // an int32 of the kernel
			}
		}
	}
	return peers, nil
}
