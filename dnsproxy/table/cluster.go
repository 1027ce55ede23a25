package table

import (
	"fmt"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// svcLabel is the label between a namespace and the cluster domain in the FQDN of a
// Service. svcName is that label as a name.
const (
	svcLabel           = "svc"
	svcName  wire.Name = "\x03" + svcLabel
)

// A Cluster holds the domain names by which short names are derived.
type Cluster struct {
	// Domain is the cluster domain, "cluster.local".
	Domain wire.Name
	// services is the parent of all namespaces, "svc.cluster.local".
	services wire.Name
	// own is the parent of the Services of the agent's namespace,
	// "shop.svc.cluster.local"; the root without a namespace.
	own wire.Name
}

// NewCluster parses a namespace, which may be empty, and a domain as Istio's agent takes
// them: the domain is "shop.svc.cluster.local" in a pod and often "cluster.local" on a VM.
// Both mean the cluster domain cluster.local.
func NewCluster(namespace, domain string) (Cluster, error) {
	name, err := wire.ParseHostname(domain)
	if err != nil {
		return Cluster{}, fmt.Errorf("domain %q: want a domain name such as shop.svc.cluster.local: %w", domain, err)
	}
	namespace = strings.ToLower(namespace)
	if rest := name.Parent(); namespace != "" && name.FirstLabel() == namespace && rest.FirstLabel() == svcLabel {
		name = rest
	}
	if name.FirstLabel() == svcLabel && name.Parent() != wire.Root {
		name = name.Parent()
	}
	services, ok := svcName.Join(name)
	if !ok {
		return Cluster{}, fmt.Errorf("domain %q: %w", domain, wire.ErrLongName)
	}
	c := Cluster{Domain: name, services: services}
	if namespace == "" {
		return c, nil
	}
	label, err := wire.ParseHostname(namespace)
	if err != nil || label.Parent() != wire.Root {
		return Cluster{}, fmt.Errorf("namespace %q: want one label such as shop", namespace)
	}
	own, ok := label.Join(c.services)
	if !ok {
		return Cluster{}, fmt.Errorf("namespace %q: %w", namespace, wire.ErrLongName)
	}
	c.own = own
	return c, nil
}

// ClusterDomain returns the cluster domain of [NewCluster] in presentation form, without
// the trailing dot.
func ClusterDomain(namespace, domain string) (string, error) {
	c, err := NewCluster(namespace, domain)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(c.Domain.String(), "."), nil
}

// shortNames returns the short names that Istio's agent derives for a Kubernetes host with a short name in a namespace.
func (c *Cluster) shortNames(short, namespace string) []string {
	if short == "" || namespace == "" {
		return nil
	}
	names := []string{short + "." + namespace, short + "." + namespace + "." + svcLabel}
	if own := c.own.FirstLabel(); own != "" && strings.EqualFold(own, namespace) {
		names = append(names, short)
	}
	return names
}

// heads appends to dst the short names of a host whose flags have flagDerived. They are the
// first labels of its FQDN: name.namespace, name.namespace.svc and, in the agent's namespace,
// name.
func (c *Cluster) heads(fqdn wire.Name, dst []wire.Name) []wire.Name {
	short := fqdn[:len(fqdn)-len(c.services)]
	dst = append(dst, short, fqdn[:len(fqdn)-len(c.Domain)])
	if c.own != wire.Root && fqdn.Below(c.own) {
		dst = append(dst, fqdn[:len(fqdn)-len(c.own)])
	}
	return dst
}
