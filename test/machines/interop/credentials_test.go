package interop

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// C1: over TLS, the token that kubelet projects opens a stream. After the token has expired, the
// agent connects with the next token.
func TestToken(t *testing.T) {
	d := start(t, options{})
	expires := time.Now().Add(20 * time.Second)
	m := d.machine(onlyIPv4)
	a := m.agent(pod{"token", "shop"}, slices.Concat(m.secure(d), []string{"--xds-token-file", m.project(d.shortToken("shop", expires))})...)
	d.wantTable(a)
	m.project(d.token("shop", audience))
	wait.Until(t, "the token has expired", func() bool { return time.Now().After(expires.Add(time.Second)) })
	d.process.end(syscall.SIGKILL)
	d.start()
	d.wantTable(a)
	if n := a.logged("Unauthenticated"); n > 0 {
		t.Errorf("istiod refused %d connects of %s, see %s", n, a.pod.name, a.log)
	}
}

// C1: a VM's token is exchanged for a workload certificate of istiod's certificate authority.
// The certificate is renewed without the token, and serves after a restart of istiod and of the
// agent. The same certificate works as --xds-cert.
func TestWorkloadCertificate(t *testing.T) {
	const life = "30s"
	d := start(t, options{env: []string{"DEFAULT_WORKLOAD_CERT_TTL=" + life, "MAX_WORKLOAD_CERT_TTL=" + life}})
	m := d.machine(onlyIPv4)
	token, state := m.write("istio-token", d.token("shop", audience)), m.path("state")
	flags := append(m.secure(d), "--xds-token-file", token, "--state-dir", state)
	a := m.agent(pod{"vm", "shop"}, flags...)
	a.await("the agent has a certificate", func() bool { return a.logged("workload certificate obtained") > 0 })
	if err := os.Remove(token); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	a.await("the certificate was renewed twice", func() bool { return a.logged("workload certificate obtained") > 2 })
	t.Logf("renewed twice in %v, with a life of %s", time.Since(begun).Round(time.Second), life)

	d.process.end(syscall.SIGKILL)
	d.start()
	d.wantTable(a)
	a.end(terminate)

	a = m.agent(pod{"vm", "shop"}, flags...)
	d.wantTable(a)
	if n := a.logged("level=WARN"); n > 0 {
		t.Errorf("%d warnings without the token, see %s", n, a.log)
	}
	certificate, err := os.ReadFile(filepath.Join(state, "workload-certificate.pem"))
	if err != nil {
		t.Fatal(err)
	}
	a.end(terminate)

	pair := m.write("pair.pem", string(certificate))
	a = m.agent(pod{"client-certificate", "shop"}, append(m.secure(d), "--xds-cert", pair, "--xds-key", pair)...)
	d.wantTable(a)
}
