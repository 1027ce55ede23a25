package dnsproxy

import (
	"fmt"
	"strings"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// svcLabel is the label below which a cluster domain holds its Services, and
// svcName that label as a name.
const (
	svcLabel           = "svc"
	svcName  wire.Name = "\x03" + svcLabel
)

// A cluster holds the names that short names are derived with.
type cluster struct {
	// domain is the cluster domain, "cluster.local".
	domain wire.Name
	// services is the parent of all namespaces, "svc.cluster.local".
	services wire.Name
	// own is the parent of the Services of the agent's own namespace,
	// "shop.svc.cluster.local"; empty without a namespace.
	own wire.Name
}

// newCluster reads a namespace and a domain as Istio's agent takes them: the
// domain is "shop.svc.cluster.local" in a pod and often plain "cluster.local" on
// a VM. Both mean the same cluster domain.
func newCluster(namespace, domain string) (cluster, error) {
	name, err := wire.ParseHostname(domain)
	if err != nil {
		return cluster{}, fmt.Errorf("domain %q: want a domain name such as shop.svc.cluster.local: %w", domain, err)
	}
	namespace = strings.ToLower(namespace)
	if rest := name.Parent(); namespace != "" && name.FirstLabel() == namespace && rest.FirstLabel() == svcLabel {
		name = rest
	}
	if name.FirstLabel() == svcLabel && name.Parent() != wire.Root {
		name = name.Parent()
	}
	c := cluster{domain: name, services: svcName + name}
	// The longest name that we put before the domain ourselves is in the SOA record.
	if _, ok := soaMailbox.Join(name); !ok {
		return cluster{}, fmt.Errorf("domain %q: %w", domain, wire.ErrLongName)
	}
	if namespace == "" {
		return c, nil
	}
	label, err := wire.ParseHostname(namespace)
	if err != nil || label.Parent() != wire.Root {
		return cluster{}, fmt.Errorf("namespace %q: want one label such as shop", namespace)
	}
	own, ok := label.Join(c.services)
	if !ok {
		return cluster{}, fmt.Errorf("namespace %q: %w", namespace, wire.ErrLongName)
	}
	c.own = own
	return c, nil
}

// ClusterDomain returns the cluster domain that namespace and domain mean, such as
// cluster.local; both are as in [Config].
func ClusterDomain(namespace, domain string) (string, error) {
	c, err := newCluster(namespace, domain)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(c.domain.String(), "."), nil
}

// place says what short names a host of this name has, by what the control plane
// says of it.
func (c *cluster) place(name wire.Name, info *hostInfo) hostFlags {
	if info.registry != registryKubernetes || name == c.domain || !name.Below(c.domain) {
		return 0
	}
	short, ok := name.CutSuffix(c.services)
	if !ok || len(short) != len(info.shortname)+len(info.namespace)+2 || info.shortname == "" || info.namespace == "" {
		return flagLocal
	}
	var buf [wire.MaxNameLen + 2]byte
	head := foldText(buf[:0], info.shortname)
	if head = foldText(head, info.namespace); wire.Name(head) != short {
		return flagLocal
	}
	return flagLocal | flagDerived
}

// shortNames lists the names that Istio's agent derives for a Kubernetes host.
func (c *cluster) shortNames(info hostInfo) []string {
	if info.shortname == "" || info.namespace == "" {
		return nil
	}
	names := []string{info.shortname + "." + info.namespace, info.shortname + "." + info.namespace + "." + svcLabel}
	if own := c.own.FirstLabel(); own != "" && strings.EqualFold(own, info.namespace) {
		names = append(names, info.shortname)
	}
	return names
}

// heads appends the short names of a host whose FQDN they are heads of:
// name.namespace, name.namespace.svc and, in the own namespace, name.
func (c *cluster) heads(fqdn wire.Name, dst []wire.Name) []wire.Name {
	short := fqdn[:len(fqdn)-len(c.services)]
	dst = append(dst, short, fqdn[:len(fqdn)-len(c.domain)])
	if c.own != wire.Root && fqdn.Below(c.own) {
		dst = append(dst, fqdn[:len(fqdn)-len(c.own)])
	}
	return dst
}
