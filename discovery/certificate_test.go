package discovery

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestReplicasShareCertificate starts three replicas at once. They present one certificate, which
// agents of each namespace can verify. The namespaces of Kubernetes itself get no ConfigMap.
func TestReplicasShareCertificate(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	a.HoldWrites(3) // each of them tries to create the Secret
	replicas := make([]replica, 3)
	var starting sync.WaitGroup
	for i := range replicas {
		log := testlog.New(t)
		s, err := New(a.config(log))
		if err != nil {
			t.Fatal(err)
		}
		replicas[i] = replica{run(t, s), log}
		starting.Go(func() { <-s.Ready() })
	}
	starting.Wait()
	if w := a.Writes(); w["POST /api/v1/secrets Created"] != 1 || w["POST /api/v1/secrets Conflict"] != 2 || w["PUT /api/v1/secrets OK"] != 0 {
		t.Errorf("requests that write: %v", w)
	}
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("shop") != "" && a.roots("data") != "" })
	leaf := a.shared().Server().Leaf
	for i, r := range replicas {
		if !r.presents(t, a.roots("data"), leaf) {
			t.Errorf("replica %d presents another certificate", i)
		}
		openDelta(t, r.as(a.roots("shop")), node(t, "shop"), nil).next()
	}
	if !slices.Equal(leaf.DNSNames, sharedNames()) {
		t.Errorf("the certificate is for %q, want %q", leaf.DNSNames, sharedNames())
	}
	if a.roots("kube-system") != "" {
		t.Error("kube-system has a ConfigMap")
	}
}

// TestRootCertificateIsPublished checks that a namespace gets the ConfigMap when it is created, and
// that one that was changed is repaired, without a loss of what is not nametap's.
func TestRootCertificateIsPublished(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	r := a.replica()
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("shop") != "" })
	a.namespace("late")
	wait.Until(t, "a new namespace has it", func() bool { return a.roots("late") == a.roots("shop") })
	a.Put(fakekube.ConfigMaps, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: nametap-ca-root-cert, namespace: late, labels: {mine: kept}}\ndata: {root-cert.pem: wrong, mine: kept}\n")
	wait.Until(t, "it is repaired", func() bool { return a.roots("late") == a.roots("shop") })
	o := a.Object(fakekube.ConfigMaps, "late/"+rootCert)
	if mine, _, err := unstructured.NestedString(o.Object, "data", "mine"); mine != "kept" || o.GetLabels()["mine"] != "kept" || err != nil {
		t.Errorf("what is not nametap's is lost: %v", o)
	}
	a.Remove(fakekube.ConfigMaps, "late/"+rootCert)
	wait.Until(t, "it is made again", func() bool { return a.roots("late") == a.roots("shop") })

	a.Refuse(fakekube.Namespaces+"/never/configmaps", http.StatusForbidden)
	a.namespace("never")
	wait.Until(t, "the namespace without it is counted", func() bool {
		return r.Server.certificate.secret.Unpublished() == 1 && r.log.Count("level=ERROR", "the root certificate is missing", "never: ", "docs/discovery.md") == 1
	})
	a.namespace("after")
	wait.Until(t, "others get it", func() bool { return a.roots("after") != "" })
	a.Refuse(fakekube.Namespaces+"/never/configmaps", 0)
	wait.Until(t, "it has it at last", func() bool { return a.roots("never") != "" && r.Server.certificate.secret.Unpublished() == 0 })
}

// TestTwoInstallations runs two installations, with a certificate each, that publish it under one name. They write
// ever less often, and say why, and namespaces that are created meanwhile get a ConfigMap at once.
func TestTwoInstallations(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	first := a.replica()
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("shop") != "" && a.roots("data") != "" })
	log := testlog.New(t)
	cfg := a.config(log)
	cfg.TLSSecret.Name.Name = "other"
	second := replica{start(t, cfg), log}
	for _, r := range []replica{first, second} {
		wait.Until(t, "the log says what is wrong", func() bool {
			return r.log.Count("level=ERROR", "the ConfigMaps with the root certificate again and again", "another installation of nametap-discovery", "--tls-ca-configmap") > 0
		})
		wait.Until(t, "the metric shows it", func() bool { return r.Server.certificate.secret.Unpublished() > 0 })
	}
	writes := func() (n int) {
		for what, count := range a.Writes() {
			if strings.Contains(what, fakekube.ConfigMaps) {
				n += count
			}
		}
		return n
	}
	before, begun := writes(), time.Now()
	a.namespace("late")
	wait.Until(t, "a new namespace has one", func() bool { return a.roots("late") != "" })
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("a new namespace has its ConfigMap after %v", took)
	}
	wait.Until(t, "seven seconds have passed", func() bool { return time.Since(begun) > 7*time.Second })
	// Two namespaces after 1, 2 and 4 s, and ten times at once in the new one, by both installations.
	if n := writes() - before; n > 60 {
		t.Errorf("%d writes in 7 s", n)
	}
	if n := first.log.Count("again and again") + second.log.Count("again and again"); n > 4 {
		t.Errorf("%d lines in the logs", n)
	}
}

// TestConfigMapIsReplaced lets the owner of a namespace replace its ConfigMap each time it is written, under another name
// each time. The ConfigMap of another namespace is repaired at once meanwhile, and the log has a line.
func TestConfigMapIsReplaced(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	r := a.replica()
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("shop") != "" && a.roots("data") != "" })
	good := a.roots("data")
	wrong := func(namespace, manager string) {
		a.Put(fakekube.ConfigMaps, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: nametap-ca-root-cert, namespace: "+namespace+", managedFields: "+
			"[{manager: "+manager+", operation: Update, apiVersion: v1, fieldsType: FieldsV1, fieldsV1: {'f:data': {'f:root-cert.pem': {}}}}]}\ndata: {root-cert.pem: "+manager+"}\n")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var tenant sync.WaitGroup
	defer tenant.Wait()
	defer cancel()
	tenant.Go(func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				wrong("shop", "tenant-"+strconv.Itoa(n))
			}
		}
	})
	wait.Until(t, "the log names the program", func() bool {
		return r.log.Count("level=ERROR", "again and again", "tenant-", "namespaces=1", "leave its key root-cert.pem alone") == 1
	})
	for range 3 {
		began := time.Now()
		wrong("data", "mistake")
		wait.Until(t, "another namespace is repaired", func() bool { return a.roots("data") == good })
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("another namespace is repaired after %v", took)
		}
	}
	if n := r.log.Count("again and again"); n != 1 {
		t.Errorf("%d lines in the log", n)
	}
}

// TestSharedCertificateIsRenewed checks that one of two replicas renews a certificate that is due,
// that both use it then, and that the authority stays.
func TestSharedCertificateIsRenewed(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	old := made(t, 70*24*time.Hour)
	a.put(old, nil)
	a.HoldWrites(2) // both replicas find it due
	var first, second replica
	var starting sync.WaitGroup
	starting.Go(func() { first = a.replica() })
	starting.Go(func() { second = a.replica() })
	starting.Wait()
	leaf := a.shared().Server().Leaf
	if leaf.Equal(old.Server().Leaf) || a.shared().Roots() != old.Roots() {
		t.Error("the certificate was not renewed, or the authority was replaced")
	}
	wait.Until(t, "both present the new one", func() bool { return first.presents(t, old.Roots(), leaf) && second.presents(t, old.Roots(), leaf) })
	if w := a.Writes(); w["PUT /api/v1/secrets OK"] != 1 || w["PUT /api/v1/secrets Conflict"] != 1 {
		t.Errorf("requests that write: %v", w)
	}
}

// TestSharedCertificateReplaced checks that a replica uses the certificates that another one has
// written: connections get the new one, streams stay, and agents get the next authority before it signs.
func TestSharedCertificateReplaced(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	r := a.replica()
	stream := openDelta(t, r.as(a.shared().Roots()), node(t, "shop"), nil)
	stream.next()
	before := a.shared()
	// As if years had passed: the other replica adds an authority, and renews the certificate.
	next, err := pki.NewPolicy(sharedNames()).Renewed(made(t, 8*365*24*time.Hour), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a.put(next, nil)
	wait.Until(t, "the replica presents the new one", func() bool { return r.presents(t, next.Roots(), next.Server().Leaf) })
	if strings.Count(next.Roots(), "BEGIN") != 2 {
		t.Errorf("the authorities are %s", next.Roots())
	}
	wait.Until(t, "both authorities are published", func() bool { return a.roots("shop") == next.Roots() })
	if _, err := r.certificate(t, before.Roots()); err == nil {
		t.Error("the first authority has signed it")
	}
	a.Put(fakekube.Services, svcYAML("shop", "more", "10.0.0.3"))
	stream.next()
}

// TestUnusableSecret checks that a Secret that is damaged or of another program is named and left as
// it is. A replica goes on with the certificate that it has, and a new one is not ready.
func TestUnusableSecret(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	r := a.replica()
	good := a.shared()
	wait.Until(t, "the root certificate is published", func() bool { return a.roots("data") != "" })
	for _, tt := range []struct {
		name   string
		change func(map[string][]byte)
		want   string
	}{
		{"damaged", func(data map[string][]byte) { data["tls.crt"] = []byte("nonsense") }, "Secret " + sharedSecret + " is damaged: tls.crt and tls.key: "},
		{"of another program", func(data map[string][]byte) { delete(data, "ca.key") }, "nametap-discovery has not made it: name another Secret (--tls-secret)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			writes := a.secretWrites()
			a.put(good, tt.change)
			wait.Until(t, "the log names it", func() bool {
				return r.log.Count("level=ERROR", "the Secret of the TLS certificate cannot be used", tt.want) == 1
			})
			late := a.waiting(tt.want)
			if !r.presents(t, good.Roots(), good.Server().Leaf) {
				t.Error("the previous certificate is not in use")
			}
			openDelta(t, r.as(good.Roots()), node(t, "shop"), nil).next()
			if now := a.secretWrites(); !maps.Equal(writes, now) {
				t.Errorf("requests that write: %v, before %v", now, writes)
			}
			a.put(good, nil)
			<-late.Ready()
			if !late.presents(t, good.Roots(), good.Server().Leaf) {
				t.Error("the new replica presents another certificate")
			}
			wait.Until(t, "the log of the Secret's recovery", func() bool { return r.log.Count("the Secret of the TLS certificate can be used again") > 0 })
		})
	}
}

// TestDeletedSecret checks that a Secret that was deleted is made again, with the authority that
// agents trust.
func TestDeletedSecret(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	r := a.replica()
	good := a.shared()
	a.Remove(fakekube.Secrets, sharedSecret)
	wait.Until(t, "it is made again", func() bool { return a.Object(fakekube.Secrets, sharedSecret) != nil })
	if a.shared().Roots() != good.Roots() || !r.presents(t, good.Roots(), good.Server().Leaf) {
		t.Error("the certificates are others")
	}
	// One that is created without data, so that replicas need no right to create Secrets.
	a.Put(fakekube.Secrets, "apiVersion: v1\nkind: Secret\nmetadata: {name: nametap-discovery-tls, namespace: nametap-system}\n")
	wait.Until(t, "it is filled", func() bool { return a.shared() != nil })
	if a.shared().Roots() != good.Roots() || !r.presents(t, good.Roots(), good.Server().Leaf) {
		t.Error("a Secret that was emptied has another authority")
	}
}

// TestSecretForbidden checks that a replica that may not read or write the Secret is not ready, says
// why, and goes on when it may.
func TestSecretForbidden(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	secrets := fakekube.Namespaces + "/nametap-system/secrets"
	a.Refuse(secrets, http.StatusForbidden)
	r := a.waiting("Secret " + sharedSecret + " cannot be read: ")
	a.Refuse(secrets, 0)
	<-r.Ready()
	if resources := r.Resources(); !slices.ContainsFunc(resources, func(s source.Status) bool { return s.Resource == "Secret "+sharedSecret && s.Synced && s.Failure == "" }) {
		t.Errorf("%+v", resources)
	}
	a.put(made(t, 70*24*time.Hour), nil)
	wait.Until(t, "the certificate is renewed", func() bool { return a.Writes()["PUT /api/v1/secrets OK"] == 1 })
	due := made(t, 70*24*time.Hour)
	a.Refuse(secrets+"/nametap-discovery-tls", http.StatusForbidden)
	a.put(due, nil)
	wait.Until(t, "the log names the Role", func() bool {
		return r.log.Count("level=ERROR", "cannot be written", "the Role of docs/discovery.md") == 1
	})
	if !r.presents(t, due.Roots(), due.Server().Leaf) {
		t.Error("the certificate that is due, and still good, is not in use")
	}
}

// TestClockIsOff checks that a replica whose clock differs from the one of the API server makes no certificate and no
// authority. It uses what other replicas have made.
func TestClockIsOff(t *testing.T) { // D50
	t.Parallel()
	a := newReplicated(t)
	const years = 10 * 365 * 24 * time.Hour
	a.SetClock(years)
	first := a.waiting("the clock of this machine is 8")
	a.SetClock(0)
	<-first.Ready()
	writes := a.secretWrites()
	for ahead, want := range map[time.Duration]string{-time.Hour: "is 1h0m0s ahead of the one of the API server", 3 * time.Hour: "is 3h0m0s behind"} {
		a.SetClock(ahead)
		others := made(t, 70*24*time.Hour) // by a replica whose clock is right
		a.put(others, nil)
		late := a.replica()
		wait.Until(t, "the log names the difference", func() bool {
			return late.log.Count("level=ERROR", want, "set the clocks of the nodes") == 1 && first.log.Count("level=ERROR", want) == 1
		})
		if !first.presents(t, others.Roots(), others.Server().Leaf) {
			t.Error("the certificate that other replicas have made is not in use")
		}
		if got := a.secretWrites(); !maps.Equal(got, writes) || a.shared().Roots() != others.Roots() {
			t.Errorf("requests that write: %v, before %v", got, writes)
		}
	}
	a.put(made(t, 70*24*time.Hour), nil)
	a.SetClock(time.Minute)
	wait.Until(t, "the certificate is renewed", func() bool { return a.secretWrites()["PUT /api/v1/secrets OK"] == 1 })
}

// Flags that contradict each other are refused.
func TestTLSFlags(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tt := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"no certificate", Config{TLSAddr: ":0"}, "set --tls-cert and --tls-key, or --tls-secret"},
		{"two certificates", Config{TLSAddr: ":0", TLSSecret: &TLSSecret{}, TLS: auth.Files{Certificate: "cert", Key: "key"}}, "two certificates"},
		{"no address", Config{TLSSecret: &TLSSecret{}}, "--tls-addr"},
		{"bad name", Config{TLSAddr: ":0", TLSSecret: &TLSSecret{DNSNames: []string{"a b"}}}, "want a DNS name"},
	} {
		tt.cfg.ConfigDir = dir
		if _, err := New(tt.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}
