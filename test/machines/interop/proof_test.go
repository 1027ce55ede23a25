package interop

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestDiscoveryTokenEnds opens a stream with a token that ends soon. When it ends, nametap-discovery ends the stream, and
// the agent connects with the token that has replaced it.
func TestDiscoveryTokenEnds(t *testing.T) { // D49
	c := prepareCluster(t)
	c.boot()
	c.mustKubectl("apply", "-f", manifests+"discovery.yaml")
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
	c.apply("apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.1.1, ports: [{port: 80}]}\n")
	r := c.replica(readManifest(t).args, "160")
	wait.Until(t, "the root certificate is published", func() bool { return c.publishedRoot("shop") != "" })
	ends := time.Now().Add(20 * time.Second)
	m := c.machine(dual)
	a := m.agent(pod{"token", "shop"}, "--xds-addr", m.address(r.ports[0]), "--xds-server-name", discoveryName,
		"--xds-root-ca", m.write("root-cert.pem", c.publishedRoot("shop")), "--xds-token-file", m.project(c.shortToken("shop", ends)), "--service-account", "default")
	a.has("web.shop.svc.cluster.local", "10.96.1.1")
	m.project(c.token("shop", audience))
	a.await("the stream has ended with the token", func() bool { return a.logged("connect again with the next one") > 0 })
	if late := time.Since(ends); late < -time.Second || late > 10*time.Second {
		t.Errorf("the stream ended %v after the token", late)
	}
	c.apply("apiVersion: v1\nkind: Service\nmetadata: {name: late, namespace: shop}\nspec: {clusterIP: 10.96.1.2, ports: [{port: 80}]}\n")
	a.has("late.shop.svc.cluster.local", "10.96.1.2")
	if n := a.logged("Unauthenticated"); n > 0 {
		t.Errorf("nametap-discovery refused %d connects of %s, see %s", n, a.pod.name, a.log)
	}
}

// TestTwoInstallations runs two installations, with a Secret each, that publish their root certificates under one name,
// and counts the writes.
func TestTwoInstallations(t *testing.T) { // D50
	c := prepareCluster(t)
	c.boot()
	c.mustKubectl("apply", "-f", manifests+"discovery.yaml")
	c.mustKubectl("create", "clusterrolebinding", "both", "--clusterrole=cluster-admin", "--serviceaccount="+discoverySystem+":nametap-discovery")
	for i := range 10 {
		c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop-" + strconv.Itoa(i) + "}\n")
	}
	args := readManifest(t).args
	other := slices.Clone(args)
	other[slices.IndexFunc(other, func(arg string) bool { return strings.HasPrefix(arg, "--tls-secret=") })] = "--tls-secret=" + discoverySystem + "/other"
	for _, r := range []replica{c.replica(args, "160"), c.replica(other, "170")} {
		r.await("the log says what is wrong", func() bool { return r.logged("another installation of nametap-discovery", "--tls-ca-configmap") > 0 })
	}
	before, begun := c.revision(), time.Now()
	wait.Until(t, "ten seconds have passed", func() bool { return time.Since(begun) > 10*time.Second })
	writes := c.revision() - before
	t.Logf("%d writes in 10 s, including Leases and the controllers' writes", writes)
	if writes > 300 {
		t.Errorf("%d writes in 10 s", writes)
	}
}

// revision returns the number of writes to etcd.
func (c *cluster) revision() int {
	c.tb.Helper()
	_, text := c.try(http.MethodGet, "/api/v1/configmaps?limit=1", "", nil)
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err := json.Unmarshal(text, &list); err != nil {
		c.tb.Fatal(err)
	}
	n, err := strconv.Atoi(list.Metadata.ResourceVersion)
	if err != nil {
		c.tb.Fatal(err)
	}
	return n
}
