package interop

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

func TestMain(m *testing.M) { os.Exit(lab.Main(m, "ip", "go", "git")) }

var (
	// meshConfig is the mesh configuration of every istiod.
	//
	//go:embed testdata/mesh.yaml
	meshConfig string
	// objects are the objects at the API server when a test begins.
	//
	//go:embed testdata/objects.yaml
	objects string
)

// newCluster starts a cluster with the custom resource definitions of Istio and objects.
func newCluster(t *testing.T, objects string) *lab.Cluster {
	t.Helper()
	c := lab.NewCluster(t)
	c.Boot()
	c.ApplyIstio()
	c.Write("mesh.yaml", meshConfig)
	c.Apply(objects)
	return c
}

// The addresses of nametap-discovery in the cluster.
const (
	discoveryPort   = "16010"
	discoveryStatus = "127.0.0.1:16014"
)

// discovery starts a nametap-discovery that reads the cluster's API server.
func discovery(c *lab.Cluster, flags ...string) *lab.Process {
	return c.Discovery("discovery", discoveryStatus, nil, append([]string{"--kubeconfig", c.Path("kubeconfig"), "--grpc-addr", ":" + discoveryPort}, flags...)...)
}

// A host is a place for agents that reaches its cluster, with a nameserver on 127.0.0.1:53.
type host struct {
	*lab.Place
	c       *lab.Cluster
	control string // the address of the cluster
	addrs   []string
}

// Which addresses a host has.
type families int

const (
	dual families = iota
	onlyIPv4
	onlyIPv6
)

// hosts is the number of hosts so far.
var hosts atomic.Int32

// newHost makes a host.
func newHost(c *lab.Cluster, f families) *host {
	c.TB.Helper()
	number := hosts.Add(1)
	h := &host{Place: c.Beside(fmt.Sprintf("host-%d", number)), c: c}
	near := netns.End{NS: c.NS, Name: fmt.Sprintf("m%d", number)}
	far := netns.End{NS: h.NS, Name: "eth0"}
	add := func(format string, bits int) {
		addr := fmt.Sprintf(format, number, 2)
		h.addrs = append(h.addrs, addr)
		h.control = fmt.Sprintf(format, number, 1)
		near.Addrs = append(near.Addrs, fmt.Sprintf("%s/%d", h.control, bits))
		far.Addrs = append(far.Addrs, fmt.Sprintf("%s/%d", addr, bits))
	}
	if f != onlyIPv4 {
		add("fd00:31:%d::%d", 64)
	}
	if f != onlyIPv6 {
		add("172.30.%d.%d", 24)
	}
	netns.Connect(near, far)
	h.Run(func() {
		fakedns.Start(h.TB, upstream, fakedns.On(netip.MustParseAddrPort("127.0.0.1:53")))
	})
	return h
}

// upstreamAddr is what the nameserver answers.
const upstreamAddr = "192.0.2.53"

// upstream answers the names that the tests do not expect in the table, so that a forwarded
// query shows. For all other names it answers NXDOMAIN.
func upstream(query *dns.Msg, network string) *dns.Msg {
	first, _, _ := strings.Cut(strings.ToLower(query.Question[0].Name), ".")
	switch first {
	case "absent", "empty", "none":
		if query.Question[0].Qtype != dns.TypeA {
			return new(dns.Msg).SetReply(query)
		}
		return fakedns.Answer(query.Question[0].Name+" 60 IN A "+upstreamAddr)(query, network)
	}
	return fakedns.Rcode(dns.RcodeNameError)(query, network)
}

// searchList returns the search list of a pod in a namespace.
func searchList(namespace string) []string {
	return []string{namespace + ".svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"}
}

// resolvConf writes the resolv.conf of a pod in a namespace, and returns its path.
func (h *host) resolvConf(namespace string) string {
	return h.Write("resolv.conf-"+namespace, fmt.Sprintf("nameserver 127.0.0.1\nsearch %s\noptions ndots:5\n", strings.Join(searchList(namespace), " ")))
}

// flags returns the flags of an agent of the host, and more.
func (h *host) flags(namespace string, more []string) []string {
	return slices.Concat([]string{"--resolv-conf", h.resolvConf(namespace), "--drain", "0s", "--state-dir", "", "--instance-ip", h.addrs[0]}, more)
}

// agent starts an agent, and returns when it has a table.
func (h *host) agent(name, namespace string, flags ...string) *lab.Agent {
	h.TB.Helper()
	return h.Agent(name, namespace, h.flags(namespace, flags)...)
}

// address returns an address of the cluster.
func (h *host) address(port string) string {
	if strings.Contains(h.control, ":") {
		return "[" + h.control + "]:" + port
	}
	return h.control + ":" + port
}

// plain returns the flags for a control plane at a port without TLS, of nametap-discovery by default.
func (h *host) plain(port string) []string {
	return []string{"--xds-plaintext", "--xds-addr", h.address(port)}
}

// secure returns the flags for istiod's port with TLS, without the flags for credentials.
func (h *host) secure(d *lab.Istiod) []string {
	h.TB.Helper()
	return []string{"--xds-addr", h.address(d.Port(15012)), "--xds-root-ca", h.Write("root-cert.pem", root(h.c, "shop", "istio-ca-root-cert")), "--xds-token-file", ""}
}

// root returns the root certificate that a control plane puts into a ConfigMap of each namespace.
func root(c *lab.Cluster, namespace, name string) string {
	c.TB.Helper()
	var object struct{ Data map[string]string }
	wait.Until(c.TB, "the root certificate is published", func() bool {
		return c.Do(http.MethodGet, "/api/v1/namespaces/"+namespace+"/configmaps/"+name, nil, &object) == nil && object.Data["root-cert.pem"] != ""
	})
	return object.Data["root-cert.pem"]
}

// audience is the audience of tokens that control planes accept.
const audience = "istio-ca"

// account returns the path of a service account, once it exists.
func account(c *lab.Cluster, namespace, name string) string {
	c.TB.Helper()
	path := "/api/v1/namespaces/" + namespace + "/serviceaccounts/" + name
	wait.Until(c.TB, "there is "+path, func() bool { return c.Do(http.MethodGet, path, nil, nil) == nil })
	return path
}

// token returns a token of a service account, as kubelet requests it; without audiences for the API server.
func token(c *lab.Cluster, namespace, name string, audiences ...string) string {
	c.TB.Helper()
	var answer struct{ Status struct{ Token string } }
	if err := c.Do(http.MethodPost, account(c, namespace, name)+"/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{"audiences": audiences, "expirationSeconds": 3600},
	}, &answer); err != nil {
		c.TB.Fatal(err)
	}
	return answer.Status.Token
}

// shortToken returns a token of the service account "default" of a namespace that expires at a time, in whole seconds. The
// API server issues none for less than ten minutes, so the test signs it with the API server's key.
func shortToken(c *lab.Cluster, namespace string, expires time.Time) string {
	c.TB.Helper()
	var object lab.Object
	c.Get(account(c, namespace, "default"), &object)
	part := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			c.TB.Fatal(err)
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	issued := time.Now().Add(-time.Hour).Unix()
	text := part(map[string]string{"alg": "RS256", "typ": "JWT"}) + "." + part(map[string]any{
		"iss": lab.Issuer, "aud": []string{audience}, "sub": "system:serviceaccount:" + namespace + ":default",
		"iat": issued, "nbf": issued, "exp": expires.Unix(),
		"kubernetes.io": map[string]any{
			"namespace": namespace, "serviceaccount": map[string]string{"name": "default", "uid": object.Metadata.UID},
		},
	})
	sum := sha256.Sum256([]byte(text))
	signature, err := rsa.SignPKCS1v15(rand.Reader, c.Key, crypto.SHA256, sum[:])
	if err != nil {
		c.TB.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// project writes a token as kubelet does, and returns its path: the file is a symbolic link into a directory that a second
// link names, and kubelet replaces that link.
func (h *host) project(token string) string {
	h.TB.Helper()
	dir := h.Path("projected")
	version := time.Now().Format("..2006_01_02_15_04_05.000000000")
	h.Write("projected/"+version+"/istio-token", token)
	for name, target := range map[string]string{"..data": version, "istio-token": "..data/istio-token"} {
		path := filepath.Join(dir, name)
		err := os.Symlink(target, path+".new")
		if err == nil {
			err = os.Rename(path+".new", path)
		}
		if err != nil {
			h.TB.Fatal(err)
		}
	}
	return filepath.Join(dir, "istio-token")
}

// rate is the number of queries a second of a load.
const rate = 500

// startLoad starts a load of queries that expects what e says.
func (h *host) startLoad(e *load.Expectation) *load.Load {
	h.TB.Helper()
	l, err := load.Start(load.Config{
		Server: netip.MustParseAddrPort(lab.AgentDNS), Rate: rate, TCP: 0.05, Kept: 0.2, Expect: e, Enter: h.Run,
	})
	if err != nil {
		h.TB.Fatal(err)
	}
	h.TB.Cleanup(func() { l.Stop() })
	return l
}

// expectation returns what an agent with a table must answer: the IPv4 addresses of each host, and a forwarded name.
func expectation(table lab.Table) *load.Expectation {
	forwarded := load.Question{Name: "absent.example.com", Addresses: load.Addrs(upstreamAddr)}
	e := &load.Expectation{Questions: slices.Repeat([]load.Question{forwarded}, max(1, len(table)/10))}
	for host, entry := range table {
		four := slices.DeleteFunc(load.Addrs(entry.IPs...), func(a netip.Addr) bool { return !a.Is4() })
		e.Questions = append(e.Questions, load.Question{Name: host, Addresses: four})
	}
	return e
}

// wantGood reports the load since the last report, and fails if an answer was wrong or none came. While the load did not
// get the processor for a second, others did not, either: then one query in a thousand may be lost.
func wantGood(t *testing.T, l *load.Load) {
	t.Helper()
	r := l.Cut()
	t.Log(r)
	bad := r.Bad()
	if lost := r.Count(load.Lost); r.Lag > time.Second && lost*1000 < r.Queries {
		bad -= lost
	}
	if bad > 0 || r.Count(load.Right) == 0 {
		t.Errorf("%d of %d queries have no right answer", bad, r.Queries)
	}
}

// answers waits until the agent of the host answers queries, NAME TYPE, as wanted.
func (h *host) answers(want map[string]string) {
	h.TB.Helper()
	for question, answer := range want {
		name, qtype, _ := strings.Cut(question, " ")
		wait.Until(h.TB, question+" is answered with "+answer, func() bool { return h.Ask(lab.AgentDNS, name, qtype) == answer })
	}
}

// service returns a Service with a cluster IP in the namespace shop.
func service(name, ip string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: shop}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n", name, ip)
}

// entryOf returns a ServiceEntry of a host in the namespace shop.
func entryOf(host, address string) string {
	return fmt.Sprintf("apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: new, namespace: shop}\n"+
		"spec: {hosts: [%s], addresses: [%s], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}\n", host, address)
}
