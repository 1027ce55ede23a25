package interop

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// TestIstiod runs agents with an unmodified istiod, and with one for dual stack that issues certificates for half a
// minute. See the subtests. The last ones end and stop istiod.
func TestIstiod(t *testing.T) { // C1, C2, C5, N1, N2, N4, N5, N7, N8, N9, N11, A2, A4, F1
	c := newCluster(t, objects)
	d := c.Istiod(lab.IstiodOptions{})
	const life = "30s"
	other := c.Istiod(lab.IstiodOptions{Offset: 1000, Env: []string{"ISTIO_DUAL_STACK=true", "DEFAULT_WORKLOAD_CERT_TTL=" + life, "MAX_WORKLOAD_CERT_TTL=" + life}})
	t.Run("tables", func(t *testing.T) { testTables(t, d, other) })
	t.Run("names of others", func(t *testing.T) { testNamesOfOthers(t, d) })
	t.Run("advice", func(t *testing.T) { testAdvice(t, d) })
	t.Run("workload certificate", func(t *testing.T) { testWorkloadCertificate(t, other) })
	t.Run("token", func(t *testing.T) { testToken(t, d) })
	t.Run("outages", func(t *testing.T) { testOutages(t, d) })
}

// restart kills istiod and starts it again.
func restart(d *lab.Istiod) {
	d.Process.End(syscall.SIGKILL)
	d.Launch()
	d.AwaitReady()
}

// testTables compares the agent's table with istiod's for every kind of workload. The wanted hosts show that istiod takes
// the agent for that workload.
func testTables(t *testing.T, d, dualStack *lab.Istiod) {
	vip := []string{"--dns-auto-allocate"}
	for _, tc := range []struct {
		name, namespace string
		istiod          *lab.Istiod
		families        families
		flags           []string
		want            map[string]string // addresses of hosts; none means that the host is absent
	}{
		{"incremental", "shop", d, dual, nil, map[string]string{
			"db-0.db.shop.svc.cluster.local": "10.244.0.1", "mixed.example.com": "198.51.100.9", "private.shop.svc.cluster.local": "10.96.1.10",
			"private.back.svc.cluster.local": "", "automatic.example.com": "",
		}},
		{"automatic", "shop", d, dual, vip, map[string]string{"automatic.example.com": "240.240.0."}},
		{"dual", "shop", dualStack, dual, vip, map[string]string{"both.shop.svc.cluster.local": "10.96.1.5 fd00:96::105", "automatic.example.com": "2001:2::"}},
		{"four", "shop", d, onlyIPv4, vip, map[string]string{"automatic.example.com": "240.240.0.", "six.shop.svc.cluster.local": ""}},
		{"six", "shop", d, onlyIPv6, vip, map[string]string{"automatic.example.com": "2001:2::", "web.shop.svc.cluster.local": ""}},
		{"other", "back", d, dual, nil, map[string]string{"private.back.svc.cluster.local": "10.96.1.9", "private.shop.svc.cluster.local": ""}},
		{"scoped", "scoped", d, dual, nil, map[string]string{"web.scoped.svc.cluster.local": "10.96.1.3", "web.back.svc.cluster.local": ""}}, // its namespace has a Sidecar
		{"narrow", "scoped", d, dual, []string{"--labels-file", "labels"}, map[string]string{ // it has a Sidecar
			"web.back.svc.cluster.local": "10.96.1.2", "web.scoped.svc.cluster.local": "",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(d.In(t), tc.families)
			h.Write("labels", "app=\"narrow\"\n")
			got := tc.istiod.WantTable(h.agent(tc.name, tc.namespace, append(h.plain(tc.istiod.Port(15010)), tc.flags...)...))
			for host, want := range tc.want {
				if ips := strings.Join(got[host].IPs, " "); !strings.Contains(ips, want) || (want == "") != (ips == "") {
					t.Errorf("%s has the addresses %q, want %q", host, ips, want)
				}
			}
		})
	}
}

// testNamesOfOthers asks for names of Services, and for names that search lists make, which another namespace's entry has.
func testNamesOfOthers(t *testing.T, d *lab.Istiod) {
	h := newHost(d.In(t), onlyIPv4)
	h.agent("house", "house", h.plain(d.Port(15010))...).Has("*.corp.example", "198.51.100.10")
	h.answers(map[string]string{
		"web A": "10.96.1.11", "web.house A": "10.96.1.11", "web.house.svc A": "10.96.1.11", "web.house.svc.cluster.local A": "10.96.1.11",
		"web.back A": "10.96.1.2", "web.back.svc.cluster.local A": "10.96.1.2", "1.1.96.10.in-addr.arpa PTR": "web.shop.svc.cluster.local.",
		"none.house.svc.cluster.local A": upstreamAddr, "empty.shop.svc.cluster.local A": upstreamAddr, "svc.cluster.local A": "NODATA",
		"git.corp.example A": "10.96.1.1 198.51.100.10", "absent.example.com.corp.example A": "NXDOMAIN",
	})
}

// testAdvice checks that the log and `nametap status` name the setting to check when istiod refuses an agent, or the agent
// refuses istiod.
func testAdvice(t *testing.T, d *lab.Istiod) {
	c := d.In(t)
	h := newHost(c, onlyIPv4)
	of := func(name, token string) []string { return []string{"--xds-token-file", h.Write(name, token)} }
	base := append(h.secure(d), append(of("token", token(c, "shop", "default", audience)), "--workload-cert", "off")...)
	for _, tc := range []struct {
		name  string
		flags []string
		want  []string // in the message
	}{
		{"token of another namespace", of("back", token(c, "back", "default", audience)), []string{"PermissionDenied", "--namespace"}},
		{"another service account", []string{"--service-account", "other"}, []string{"PermissionDenied", "--service-account"}},
		{"token for another audience", of("vault", token(c, "shop", "default", "vault")), []string{"Unauthenticated", "--xds-token-file", "istio-ca"}},
		{"expired token", of("expired", shortToken(c, "shop", time.Now().Add(-time.Minute))), []string{"has expired", "--xds-token-file"}},
		{"no token", []string{"--xds-token-file", h.Path("nothing")}, []string{"no such file", "--xds-token-file"}},
		{"no credentials", []string{"--xds-token-file", ""}, []string{"Unauthenticated", "--xds-token-file"}},
		{"no root certificate", []string{"--xds-root-ca", h.Path("nothing")}, []string{"no such file", "--xds-root-ca"}},
		{"another root certificate", []string{"--xds-root-ca", c.Path("certs/apiserver.crt")}, []string{"unknown authority", "--xds-root-ca"}},
		{"another server name", []string{"--xds-server-name", "istiod.istio-system.svc.cluster.local"}, []string{"--xds-server-name"}},
		{"unknown cluster", []string{"--cluster-id", "west"}, []string{"Unauthenticated", "--cluster-id"}},
		{"TLS at the port without", []string{"--xds-addr", h.address(d.Port(15010))}, []string{"does not speak TLS", "--xds-plaintext"}},
		{"no TLS at the port with", []string{"--xds-plaintext"}, []string{"leave out --xds-plaintext"}},
		{"nothing listens", []string{"--xds-addr", h.address("15999")}, []string{"connection refused", "--xds-addr"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := h.Launch(strings.ReplaceAll(tc.name, " ", "-"), "shop", h.flags("shop", slices.Concat(base, tc.flags))...)
			defer a.End(syscall.SIGTERM)
			a.Await("the agent logs why it has no stream", func() bool { return a.Logged("no stream to the control plane") > 0 })
			status := ""
			a.Await("the status says why there is no stream", func() bool {
				status = h.Nametap("status")
				return strings.Contains(status, tc.want[0])
			})
			for _, part := range tc.want {
				if a.Logged("no stream to the control plane", part) == 0 || !strings.Contains(status, part) {
					t.Errorf("the message lacks %q:\n%s\n%s", part, a.Text(), status)
				}
			}
		})
	}
}

// testToken opens a stream over TLS with a token that kubelet projects. After that has expired, the agent connects with the
// next token.
func testToken(t *testing.T, d *lab.Istiod) {
	c := d.In(t)
	expires := time.Now().Add(20 * time.Second)
	h := newHost(c, onlyIPv4)
	a := h.agent("token", "shop", append(h.secure(d), "--xds-token-file", h.project(shortToken(c, "shop", expires)))...)
	d.WantTable(a)
	h.project(token(c, "shop", "default", audience))
	wait.Until(t, "the token has expired", func() bool { return time.Now().After(expires.Add(time.Second)) })
	restart(d)
	d.WantTable(a)
	if n := a.Logged("Unauthenticated"); n > 0 {
		t.Errorf("istiod refused %d connects, see %s", n, a.Log)
	}
}

// testWorkloadCertificate exchanges a VM's token for a workload certificate of istiod's authority. The certificate is
// renewed without the token, and serves after a restart of istiod and of the agent. The same certificate works as
// --xds-cert.
func testWorkloadCertificate(t *testing.T, d *lab.Istiod) {
	c := d.In(t)
	h := newHost(c, onlyIPv4)
	file := h.Write("istio-token", token(c, "shop", "default", audience))
	flags := append(h.secure(d), "--xds-token-file", file, "--state-dir", h.Path("state"))
	a := h.agent("vm", "shop", flags...)
	a.Await("the agent has a certificate", func() bool { return a.Logged("workload certificate obtained") > 0 })
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	a.Await("the certificate was renewed twice", func() bool { return a.Logged("workload certificate obtained") > 2 })
	restart(d)
	d.WantTable(a)
	a.End(syscall.SIGTERM)

	a = h.agent("vm", "shop", flags...)
	d.WantTable(a)
	if n := a.Logged("level=WARN"); n > 0 {
		t.Errorf("%d warnings without the token, see %s", n, a.Log)
	}
	certificate := h.Read("state/workload-certificate.pem")
	a.End(syscall.SIGTERM)
	pair := h.Write("pair.pem", certificate)
	d.WantTable(h.agent("client-certificate", "shop", append(h.secure(d), "--xds-cert", pair, "--xds-key", pair)...))
}

// testOutages restarts, kills and stops istiod and its API server: the agent answers every query from its table. Afterwards
// its table is istiod's again, and changes arrive.
func testOutages(t *testing.T, d *lab.Istiod) {
	c := d.In(t)
	h := newHost(c, onlyIPv4)
	a := h.agent("outage", "shop", h.plain(d.Port(15010))...)
	l := h.startLoad(expectation(d.WantTable(a)))
	kill := func() { c.APIServer.End(syscall.SIGKILL) }
	for i, tc := range []struct {
		name   string
		outage func()
	}{
		{"istiod restarts", func() { d.Process.End(syscall.SIGTERM); d.Launch(); d.AwaitReady() }},
		{"istiod is killed", func() { restart(d) }},
		{"istiod hangs for 40 s", func() {
			d.Process.Signal(syscall.SIGSTOP)
			time.Sleep(40 * time.Second) //nolint:forbidigo // the outage, during which the load checks all answers
			d.Process.Signal(syscall.SIGCONT)
		}},
		{"istiod starts without the API server", func() {
			kill()
			d.Process.End(syscall.SIGKILL)
			d.Launch()
			time.Sleep(5 * time.Second) //nolint:forbidigo // istiod is not ready for that long
			c.StartAPIServer()
			d.AwaitReady()
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.outage()
			d.WantTable(a)
			host, address := fmt.Sprintf("outage-%d.example.com", i), fmt.Sprintf("198.51.100.%d", 210+i)
			c.Apply(entryOf(host, address))
			h.answers(map[string]string{host + " A": address})
			wantGood(t, l)
		})
	}
}
