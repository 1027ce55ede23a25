package discovery

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

const (
	sharedSecret = "nametap-system/nametap-discovery-tls"
	rootCert     = "nametap-ca-root-cert"
	sharedName   = "nametap-discovery.nametap-system.svc"
)

// replicated is an API server for replicas that share a certificate.
type replicated struct {
	*fakekube.API
	t *testing.T
}

// newReplicated starts an API server with two namespaces and one of Kubernetes' own.
func newReplicated(t *testing.T) replicated {
	t.Helper()
	a := replicated{fakekube.Start(t), t}
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.SetToken("good", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
	for _, name := range []string{"shop", "data", "kube-system"} {
		a.namespace(name)
	}
	return a
}

func (a replicated) namespace(name string) {
	a.Put(fakekube.Namespaces, "apiVersion: meta.k8s.io/v1\nkind: PartialObjectMetadata\nmetadata: {name: "+name+"}\n")
}

// A replica is a server that shares its certificate with others.
type replica struct{ running }

// config returns the configuration of a replica.
func (a replicated) config(log *testlog.Buffer) Config {
	a.t.Helper()
	cfg := onAPI(a.t, a.API)
	cfg.GRPCAddr, cfg.TLSAddr, cfg.Logger = "127.0.0.1:0", "127.0.0.1:0", log.Logger()
	cfg.TLSSecret = &TLSSecret{Access: cfg.Kubernetes, Name: source.Name{Namespace: "nametap-system", Name: "nametap-discovery-tls"}, ConfigMap: rootCert}
	return cfg
}

// roots returns the certificates in the ConfigMap of a namespace; "" without one.
func (a replicated) roots(namespace string) string {
	o := a.Object(fakekube.ConfigMaps, namespace+"/"+rootCert)
	if o == nil {
		return ""
	}
	text, _, err := unstructured.NestedString(o.Object, "data", "root-cert.pem")
	if err != nil {
		a.t.Error(err)
	}
	return text
}

// shared returns the certificates in the Secret.
func (a replicated) shared() *pki.Certificates {
	a.t.Helper()
	data := map[string][]byte{}
	if o := a.Object(fakekube.Secrets, sharedSecret); o != nil {
		fields, _, err := unstructured.NestedStringMap(o.Object, "data")
		if err != nil {
			a.t.Fatal(err)
		}
		for key, value := range fields {
			if data[key], err = base64.StdEncoding.DecodeString(value); err != nil {
				a.t.Fatal(err)
			}
		}
	}
	c, err := pki.Parse(data)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// sharedNames are the names of the Service.
func sharedNames() []string {
	return []string{"nametap-discovery.nametap-system", sharedName, sharedName + ".cluster.local"}
}

// made returns certificates that were made some time ago.
func made(t *testing.T, ago time.Duration) *pki.Certificates {
	t.Helper()
	c, err := pki.NewPolicy(sharedNames()).Renewed(nil, time.Now().Add(-ago))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// clientConfig returns the settings of an agent that trusts the roots.
func clientConfig(roots string) *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(roots))
	return &tls.Config{RootCAs: pool, ServerName: sharedName, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
}

// as returns the server for an agent that trusts the roots.
func (r replica) as(roots string) running {
	s := r.running
	s.with = []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(clientConfig(roots))), grpc.WithPerRPCCredentials(bearer{"good", ""})}
	return s
}

// presents reports whether agents that trust the roots get this certificate.
func (r replica) presents(t *testing.T, roots string, want *x509.Certificate) bool {
	t.Helper()
	conn, err := (&tls.Dialer{Config: clientConfig(roots)}).DialContext(t.Context(), "tcp", r.tlsAddr.String())
	if err != nil {
		return false
	}
	defer conn.Close()
	return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].Equal(want) //nolint:forcetypeassert // it is what the dialer returns
}
