package inject

import (
	"fmt"
	"maps"
	"net"
	"strconv"
	"strings"
)

// The annotations of a pod that replace settings. The mode's annotation may also be on the
// namespace.
const (
	modeAnnotation = "nametap.dev/mode"
	cpuRequest     = "nametap.dev/cpu-request"
	cpuLimit       = "nametap.dev/cpu-limit"
	memoryRequest  = "nametap.dev/memory-request"
	memoryLimit    = "nametap.dev/memory-limit"
)

const (
	// dataplaneMode is Istio's label of a pod or a namespace. With the value ambient, ztunnel proxies the pod, and
	// listens on port 15053 in it.
	dataplaneMode = "istio.io/dataplane-mode"
	// ambientCapture is Istio's annotation that switches off the DNS capture of ztunnel.
	ambientCapture = "ambient.istio.io/dns-capture"
	// uidRange is OpenShift's annotation of a namespace with the users that its pods may have: FIRST/NUMBER, or
	// FIRST-LAST.
	uidRange = "openshift.io/sa.scc.uid-range"
)

// forPod returns the settings of a pod: annotations of the pod, and then of its namespace, take precedence. It notes in
// the pod what follows for it. An error says why it is refused.
func (c Config) forPod(p *pod, ns Namespace) (Config, error) {
	for _, annotations := range []map[string]string{p.Metadata.Annotations, ns.Annotations} {
		if mode, ok := annotations[modeAnnotation]; ok {
			c.Mode = Mode(mode)
			if err := c.check(); err != nil {
				return c, fmt.Errorf("annotation %s: %w", modeAnnotation, err)
			}
			break
		}
	}
	var err error
	if p.user, err = agentUser(ns, c.Mode); err != nil {
		return c, err
	}
	if p.ambient = p.isAmbient(ns); p.ambient && c.Mode == Rules && c.Settings["dns-addr"] == "" {
		settings := map[string]string{"dns-addr": net.JoinHostPort("localhost", strconv.Itoa(besideZtunnel))}
		maps.Copy(settings, c.Settings)
		c.Settings = settings
	}
	return c.withAmounts(p.Metadata.Annotations)
}

// withAmounts returns the settings with the resources of annotations.
func (c Config) withAmounts(annotations map[string]string) (Config, error) {
	c.Resources = Resources{maps.Clone(c.Resources.Requests), maps.Clone(c.Resources.Limits)}
	given := ""
	for _, a := range []struct {
		name    string
		amounts Amounts
		key     string
	}{
		{cpuRequest, c.Resources.Requests, "cpu"}, {memoryRequest, c.Resources.Requests, "memory"},
		{cpuLimit, c.Resources.Limits, "cpu"}, {memoryLimit, c.Resources.Limits, "memory"},
	} {
		if text, ok := annotations[a.name]; ok {
			a.amounts[a.key], given = text, a.name
		}
	}
	if given == "" {
		return c, nil
	}
	if err := c.Resources.check(); err != nil {
		return c, fmt.Errorf("the pod's annotations, such as %s: %w", given, err)
	}
	return c, nil
}

// isAmbient reports whether a pod is in Istio's ambient mode. A pod with a sidecar is not.
func (p *pod) isAmbient(ns Namespace) bool {
	mode, labelled := p.Metadata.Labels[dataplaneMode]
	if !labelled {
		mode = ns.Labels[dataplaneMode]
	}
	return mode == "ambient" && !p.hasIstio()
}

// agentUser returns the user of the agent. OpenShift admits users of the namespace's range; the
// first one is the user of its other containers.
func agentUser(ns Namespace, mode Mode) (int64, error) {
	text, ok := ns.Annotations[uidRange]
	switch {
	case !ok:
		return agentID, nil
	case mode == Rules:
		return 0, fmt.Errorf("the namespace has the annotation %s, so it is one of OpenShift, which does not permit user %d and the capability NET_ADMIN: use the mode %s, for example by the annotation %s of the namespace", uidRange, agentID, Resolv, modeAnnotation)
	}
	first, rest, block := strings.Cut(text, "/")
	if !block {
		first, rest, _ = strings.Cut(text, "-")
	}
	from, err := strconv.ParseInt(first, 10, 32)
	size, err2 := strconv.ParseInt(rest, 10, 32)
	if !block {
		size -= from - 1
	}
	if err != nil || err2 != nil || from <= 0 || size <= 0 {
		return 0, fmt.Errorf("the namespace has the annotation %s: %.100q: want a range of users, such as 1000650000/10000", uidRange, text)
	}
	return from + min(1, size-1), nil
}
