package inject

import "regexp"

// Names, and numbers that the agent and deploy/kubernetes/istiod.yaml have, too.
const (
	agentName   = "nametap"
	captureName = "nametap-capture"

	tokenVolume    = "nametap-token"
	rootCertVolume = "nametap-root-cert"
	// rootFile is the file in that volume.
	rootFile = "root-cert.pem"
	// rootCAs is the annotation with the root certificates of the control plane, in PEM. kubelet updates the file when
	// the annotation of a running pod changes.
	rootCAs     = "nametap.dev/root-cas"
	stateVolume = "nametap-state"
	// guardVolume is the volume of a ConfigMap with a policy. kubelet starts no container before the ConfigMap is there, and
	// has the key policyKey.
	guardVolume = "nametap-guard"
	guardDir    = "/etc/nametap/guard"
	policyKey   = "policy.yaml"

	agentID    = 1337
	dnsPort    = 15053
	statusPort = 15020
	egressPort = 15054
	// besideIstio is the status port if Istio's agent is in the pod: Istio's agent uses 15020.
	besideIstio = 15055
	// besideZtunnel is the DNS port if ztunnel is in the pod: ztunnel uses 15053.
	besideZtunnel = 15056
	// plainDNS is the DNS port in mode Resolv: resolv.conf cannot name another port.
	plainDNS = 53

	loopback = "127.0.0.1"

	// program is the path of the agent in its image.
	program = "/usr/local/bin/nametap"
	// goMemory is the variable from which Go's runtime reads how much memory it may use.
	goMemory = "GOMEMLIMIT"
	// awaitAgent is how long the start of a pod waits for the agent's listeners, and then for its table.
	awaitAgent = "30s"
)

// lowPorts is the sysctl with the first port that needs no capability. The Pod Security level restricted allows it.
const lowPorts = "net.ipv4.ip_unprivileged_port_start"

// The longest names, in characters. A registry, a name, a tag and a digest make the name of an image.
const maxName, maxImage = 253, 512

var (
	// imageName matches all names of images that the API server and engines accept, and some others.
	imageName  = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9._/-]*|\[[0-9a-fA-F:]+\])(:[0-9]+/[A-Za-z0-9._/-]+)?(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@[a-z0-9]+:[0-9a-f]{32,})?$`)
	objectName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	domainName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?([.][A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*$`)
	printable  = regexp.MustCompile(`^[^\x00-\x1f\x7f]*$`)
)
