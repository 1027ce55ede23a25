package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// The names of deploy/chart.
const (
	serviceName     = "nametap-discovery"
	authoritySecret = "nametap-discovery-ca"
	serverSecret    = "nametap-discovery-cert" //nolint:gosec // a name
	rootConfigMap   = "nametap-ca-root-cert"
	rootKey         = "root-cert.pem"
	webhooks        = "nametap-inject"
)

const (
	// authorityLife is that of a self-signed authority: its end would protect nothing, and each pod would need another.
	authorityLife = 36500 * 24 * time.Hour
	serverLife    = 3650 * 24 * time.Hour
	// backdate is how much the clocks of machines may differ.
	backdate = 5 * time.Minute
)

// certificatesCommand has the flags of `nametap-discovery certificates`.
type certificatesCommand struct {
	namespace, domain, authority string
	pods                         []string
	webhook                      bool
}

func newCertificates(stdout io.Writer) *cobra.Command {
	var c certificatesCommand
	command := &cobra.Command{
		Use:   "certificates [--namespace NS] [--authority FILE]",
		Short: "Print the Secrets with the certificate of nametap-discovery",
		Long: `Make an authority, and a certificate for the Service nametap-discovery, and print them as the
Secrets ` + authoritySecret + ` and ` + serverSecret + `. The chart needs neither: Helm makes them.

The certificate is valid for ten years. To replace it by another one of the same authority, which
agents trust already, name a file with the Secret ` + authoritySecret + `.`,
		Example: `  nametap-discovery certificates --webhook | kubectl apply --server-side -f -
  kubectl -n nametap-system get secret ` + authoritySecret + ` -o yaml > ca.yaml
  nametap-discovery certificates --authority ca.yaml | kubectl apply --server-side -f -`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error { return c.run(stdout) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVarP(&c.namespace, "namespace", "n", "nametap-system", "`namespace` of nametap-discovery")
	flags.StringVar(&c.domain, "cluster-domain", "cluster.local", "`domain` of Services")
	flags.StringVar(&c.authority, "authority", "", "`file` with the Secret of the authority, as kubectl prints it; - is the standard input. Empty makes an authority")
	flags.StringSliceVar(&c.pods, "pods-in", nil, "`namespaces` whose pods mount the ConfigMap "+rootConfigMap+", which is printed, too")
	flags.BoolVar(&c.webhook, "webhook", false, "also print the authority for the webhook of deploy/kubernetes/webhook.yaml, for kubectl apply --server-side")
	return command
}

// run prints the objects.
func (c *certificatesCommand) run(stdout io.Writer) error {
	var objects []any
	authority, err := c.readAuthority()
	if err != nil {
		return err
	}
	if authority == nil {
		if authority, err = signed(&x509.Certificate{
			Subject: pkix.Name{CommonName: serviceName}, NotAfter: time.Now().Add(authorityLife),
			IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
		}, nil); err != nil {
			return err
		}
		objects = append(objects, c.secret(authoritySecret, authority.data()))
	}
	name := serviceName + "." + c.namespace
	server, err := signed(&x509.Certificate{
		Subject: pkix.Name{CommonName: serviceName}, DNSNames: []string{name, name + ".svc", name + ".svc." + c.domain},
		NotAfter: time.Now().Add(serverLife), KeyUsage: x509.KeyUsageDigitalSignature,
	}, authority)
	if err != nil {
		return err
	}
	data, root := server.data(), authority.data()["tls.crt"]
	data["ca.crt"] = root
	objects = append(objects, c.secret(serverSecret, data))
	for _, namespace := range c.pods {
		objects = append(objects, object("v1", "ConfigMap", named(namespace, rootConfigMap), map[string]any{"data": map[string]string{rootKey: string(root)}}))
	}
	if c.webhook {
		var hooks []any
		for _, kind := range []string{"namespace", "pod"} {
			hooks = append(hooks, map[string]any{"name": kind + ".inject.nametap.dev", "clientConfig": map[string]any{"caBundle": root}})
		}
		objects = append(objects, object("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", map[string]string{"name": webhooks}, map[string]any{"webhooks": hooks}))
	}
	for _, o := range objects {
		text, err := yaml.Marshal(o)
		if err == nil {
			_, err = fmt.Fprintf(stdout, "---\n%s", text)
		}
		if err != nil {
			return fmt.Errorf("printing certificates: %w", err)
		}
	}
	return nil
}

// secret returns a Secret in the namespace of nametap-discovery.
func (c *certificatesCommand) secret(name string, data map[string][]byte) any {
	return object("v1", "Secret", named(c.namespace, name), map[string]any{"type": "kubernetes.io/tls", "data": data})
}

// object returns an object with fields.
func object(version, kind string, metadata map[string]string, fields map[string]any) any {
	fields["apiVersion"], fields["kind"], fields["metadata"] = version, kind, metadata
	return fields
}

func named(namespace, name string) map[string]string {
	return map[string]string{"namespace": namespace, "name": name}
}

// readAuthority reads the Secret of --authority; it returns nil if the flag is empty.
func (c *certificatesCommand) readAuthority() (*certificate, error) {
	var text []byte
	var err error
	switch c.authority {
	case "":
		return nil, nil //nolint:nilnil // documented
	case "-":
		text, err = io.ReadAll(os.Stdin)
	default:
		text, err = os.ReadFile(c.authority)
	}
	var secret struct{ Data map[string][]byte }
	if err == nil {
		err = yaml.Unmarshal(text, &secret)
	}
	var pair tls.Certificate
	if err == nil {
		pair, err = tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
	}
	if err == nil && !pair.Leaf.IsCA {
		err = errors.New("tls.crt is not the certificate of an authority")
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if err == nil && !ok {
		err = fmt.Errorf("tls.key: want an ECDSA key, got %T", pair.PrivateKey)
	}
	if err != nil {
		return nil, usageError{fmt.Errorf("--authority=%q: want the Secret %s, with tls.crt and tls.key: %w", c.authority, authoritySecret, err)}
	}
	return &certificate{pair.Leaf, key}, nil
}

// A certificate has its private key.
type certificate struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

// signed returns a certificate with the fields of template, for servers. It is self-signed without an authority.
func signed(template *x509.Certificate, authority *certificate) (*certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if authority == nil {
		authority = &certificate{template, key}
	}
	template.NotBefore, template.ExtKeyUsage = time.Now().Add(-backdate), []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, template, authority.Certificate, key.Public(), authority.key)
	if err != nil {
		return nil, fmt.Errorf("making a certificate: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	return &certificate{parsed, key}, err
}

// data returns the data of a Secret.
func (c *certificate) data() map[string][]byte {
	key, err := x509.MarshalPKCS8PrivateKey(c.key)
	if err != nil {
		panic(err) // it is an ECDSA key of a known curve
	}
	return map[string][]byte{
		"tls.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}),
		"tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
	}
}
