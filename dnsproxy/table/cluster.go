package table

import (
	"fmt"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// svcLabel is the label between a namespace and the cluster domain in the FQDN of a
// Service, such as web.shop.svc.cluster.local. svcName is this label as a name.
const (
	svcLabel           = "svc"
	svcName  wire.Name = "\x03" + svcLabel
)

// A Cluster holds the domain names that short names are derived with.
type Cluster struct {
	// Domain is the cluster domain, such as cluster.local.
	Domain wire.Name
	// services is the parent of all namespaces, such as svc.cluster.local.
	services wire.Name
	// ownNamespace is the parent of the Services of the agent's namespace, such as shop.svc.cluster.local. It is the
	// root if the agent has no namespace.
	ownNamespace wire.Name
}

// NewCluster returns the Cluster of a namespace and a domain. The namespace may be empty. As in Istio's agent, the
// domain may be the cluster domain, such as cluster.local, or may have a namespace before it, such as
// shop.svc.cluster.local.
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
	parent, ok := label.Join(c.services)
	if !ok {
		return Cluster{}, fmt.Errorf("namespace %q: %w", namespace, wire.ErrLongName)
	}
	c.ownNamespace = parent
	return c, nil
}

// zone returns the zone of the cluster that name is in: the cluster domain, or svc, which short names such as web.shop.svc
// end in. It returns the root for all other names. Names in these zones belong to Services, and to external hosts of
// which the control plane says that they may have them.
func (c *Cluster) zone(name wire.Name) wire.Name {
	switch {
	case name.Below(c.Domain):
		return c.Domain
	case name.Below(svcName):
		return svcName
	}
	return wire.Root
}

// Zones returns the domains whose names belong to Services.
func (c *Cluster) Zones() []wire.Name { return []wire.Name{c.Domain, svcName} }

// searched reports whether Kubernetes puts domain into the search lists of the agent's namespace.
func (c *Cluster) searched(domain wire.Name) bool {
	return domain == c.Domain || domain == c.services || domain == c.ownNamespace && domain != wire.Root
}

// ClusterDomain returns the cluster domain that [NewCluster] finds, as text without
// a trailing dot.
func ClusterDomain(namespace, domain string) (string, error) {
	c, err := NewCluster(namespace, domain)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(c.Domain.String(), "."), nil
}

// heads appends to dst the short names of a host that has flagDerived. They are the first labels of its FQDN:
// name.namespace and name.namespace.svc. For a host in the agent's namespace, name alone is a short name, too.
func (c *Cluster) heads(fqdn wire.Name, dst []wire.Name) []wire.Name {
	short := fqdn[:len(fqdn)-len(c.services)]
	dst = append(dst, short, fqdn[:len(fqdn)-len(c.Domain)])
	if c.ownNamespace != wire.Root && fqdn.Below(c.ownNamespace) {
		dst = append(dst, fqdn[:len(fqdn)-len(c.ownNamespace)])
	}
	return dst
}
