package interop

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	// proxyAddr is a proxy of the API server.
	proxyAddr = "127.0.0.1:6445"
	// maxSilence is after which time of silence nametap-discovery lists objects again.
	maxSilence = 3 * time.Minute
	// listEnd is in the event that ends the list of a watch, and afterEnd how long the rest of that event may take.
	listEnd  = "k8s.io/initial-events-end"
	afterEnd = 200 * time.Millisecond
)

// A stallingProxy is a proxy of the API server that can stall watches: it accepts them and passes on the list that they
// begin with, and then nothing.
type stallingProxy struct {
	stalls atomic.Bool
}

// stallingProxy starts a proxy in the cluster's namespace, and returns it with a kubeconfig.
func (c *cluster) stallingProxy() (p *stallingProxy, kubeconfig string) {
	c.tb.Helper()
	p = new(stallingProxy)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: apiAddr})
	proxy.FlushInterval = -1
	proxy.Transport = &http.Transport{
		DialContext:     c.dial,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // of a server that the test has started
	}
	proxy.ModifyResponse = func(r *http.Response) error {
		if query := r.Request.URL.Query(); query.Get("watch") == "true" {
			r.Body = &stallingBody{ReadCloser: r.Body, proxy: p, lists: query.Get("sendInitialEvents") == "true"}
		}
		return nil
	}
	server := httptest.NewUnstartedServer(proxy)
	server.EnableHTTP2 = true
	c.Run(func() {
		ln, err := new(net.ListenConfig).Listen(c.tb.Context(), "tcp", proxyAddr)
		if err != nil {
			c.tb.Fatal(err)
		}
		_ = server.Listener.Close() // the listener in the machine's namespace
		server.Listener = ln
	})
	server.StartTLS()
	c.tb.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return p, c.write("kubeconfig-proxy", strings.ReplaceAll(c.text("kubeconfig"), apiAddr, proxyAddr))
}

// A stallingBody is the response to a watch.
type stallingBody struct {
	io.ReadCloser
	proxy *stallingProxy
	lists bool      // the end of its list was not passed on yet
	last  []byte    // the last bytes that were
	ended time.Time // when it was
}

// Read reads what is passed on.
func (b *stallingBody) Read(p []byte) (int, error) {
	for {
		n, err := b.ReadCloser.Read(p)
		stalls := b.proxy.stalls.Load() && !b.lists && time.Since(b.ended) > afterEnd
		if b.lists {
			b.last = append(b.last, p[:n]...)
			if bytes.Contains(b.last, []byte(listEnd)) {
				b.lists, b.ended = false, time.Now()
			}
			b.last = b.last[max(0, len(b.last)-len(listEnd)):]
		}
		if err != nil || !stalls {
			return n, err
		}
	}
}

// stalledChange are changes of what nametap-discovery reads, with a number.
func stalledChange(n int) string {
	return strings.NewReplacer("10.96.2.2", "10.96.2.1"+strconv.Itoa(n), "10.244.2.2", "10.244.2."+strconv.Itoa(n), "198.51.100.22", "198.51.100."+strconv.Itoa(n),
		"{name: added,", "{name: added-"+strconv.Itoa(n)+",").Replace(afterBackupChanged)
}

// TestStalledWatches checks that a nametap-discovery whose watches stay open and send nothing lists the objects again
// after 3 min, and at once if an agent comes that has had more from another one. Without a proxy, each watch is heard of
// within that time.
func TestStalledWatches(t *testing.T) { // D60, D38
	c := prepareCluster(t)
	c.startEtcd()
	c.startAPIServer()
	c.apply(istioDefinitions(t))
	c.apply(restored)
	proxy, kubeconfig := c.stallingProxy()
	d := c.discovery("--kubeconfig", kubeconfig, "--clusters-namespace", "istio-system")
	m, moves := c.machine(onlyIPv4), c.machine(onlyIPv4)
	a := m.agent(pod{"stays", "shop"}, m.discoveryFlags()...)
	direct := c.directDiscovery()
	wants := func(a *agent, n int) func() bool {
		return func() bool {
			table, number := a.table(), strconv.Itoa(n)
			return strings.Join(table["added-"+number+".shop.svc.cluster.local"].IPs, "") == "10.96.2.1"+number &&
				strings.Join(table["db.shop.svc.cluster.local"].IPs, "") == "10.244.2."+number &&
				strings.Join(table["api.example.com"].IPs, "") == "198.51.100."+number
		}
	}
	c.apply(stalledChange(1))
	a.await("a change comes", wants(a, 1))

	proxy.stalls.Store(true)
	time.Sleep(2 * afterEnd) //nolint:forbidigo // what the proxy still passes on of lists
	c.apply(stalledChange(2))
	flags := []string{"--xds-plaintext", "--state-dir", moves.path("state")}
	b := moves.agent(pod{"moves", "shop"}, append(flags, "--xds-addr", moves.address(directPort))...)
	b.await("the other replica has the change", wants(b, 2))
	b.end(terminate)
	b = moves.launch(pod{"moves", "shop"}, append(flags, "--xds-addr", moves.address(discoveryPort))...)
	began := time.Now()
	a.await("the agent that has stayed has the change", func() bool {
		if b.logged("msg=ready") > 0 && !wants(b, 2)() {
			t.Fatalf("the agent that moved has %v", b.table())
		}
		return wants(a, 2)()
	})
	t.Logf("the change came %v after an agent moved", time.Since(began).Round(time.Millisecond))
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("that took %v", took)
	}
	b.end(terminate)

	time.Sleep(2 * afterEnd) //nolint:forbidigo // as above
	began = time.Now()
	c.apply(stalledChange(3))
	a.await("the agent has the change", wants(a, 3))
	took := time.Since(began)
	t.Logf("a change came %v after it was made", took.Round(time.Second))
	if took > maxSilence+10*time.Second {
		t.Errorf("that took more than %v", maxSilence)
	}
	if n := d.process.logged("sends nothing", "what=services"); n != 1 {
		t.Errorf("%d lines in the log of nametap-discovery, want 1", n)
	}
	if n := direct.logged("sends nothing"); n > 0 {
		t.Errorf("%d watches without a proxy were silent, see %s", n, direct.log)
	}
	for _, r := range c.resources(directStatus) {
		ago := time.Since(r.Heard).Round(time.Second)
		t.Logf("%s: heard of %v ago", r.Resource, ago)
		if ago > maxSilence/2 {
			t.Errorf("no bookmark of %s has come for %v", r.Resource, ago)
		}
	}
}

// The addresses of a nametap-discovery that reads the API server without a proxy.
const (
	directPort   = "16020"
	directStatus = "127.0.0.1:16024"
)

// directDiscovery starts a nametap-discovery that watches everything that it can.
func (c *cluster) directDiscovery() *daemon {
	c.tb.Helper()
	d := c.run("discovery-direct", exec.Command(discoveryBinary,
		"--kubeconfig", c.path("kubeconfig"), "--grpc-addr", ":"+directPort, "--http-addr", directStatus, "--state-dir", "",
		"--clusters-namespace", "istio-system", "--tls-addr", ":16022", "--tls-secret", "istio-system/nametap"))
	d.await("nametap-discovery is ready", func() bool {
		response, err := c.client.Get("http://" + directStatus + "/healthz/ready")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return d
}
