package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// printed runs `nametap-discovery certificates`, and returns the Secrets by their names, and each Secret's text.
func printed(t *testing.T, args ...string) (secrets map[string]corev1.Secret, texts map[string]string) {
	t.Helper()
	var out, failed bytes.Buffer
	if code := execute(t.Context(), append([]string{"nametap-discovery", "certificates"}, args...), &out, &failed); code != exitOK {
		t.Fatalf("exit code %d: %s", code, &failed)
	}
	secrets, texts = map[string]corev1.Secret{}, map[string]string{}
	for text := range strings.SplitSeq(out.String(), "---\n") {
		var s corev1.Secret
		if err := yaml.Unmarshal([]byte(text), &s); err != nil {
			t.Fatal(err)
		}
		if s.Kind == "Secret" {
			secrets[s.Name], texts[s.Name] = s, text
		}
	}
	return secrets, texts
}

// TestCertificates checks that agents which trust the authority accept the server under each of its names, also with a
// later certificate.
func TestCertificates(t *testing.T) { // D69
	first, texts := printed(t, "--namespace", "mesh", "--cluster-domain", "corp.example")
	file := filepath.Join(t.TempDir(), "ca.yaml")
	if err := os.WriteFile(file, []byte(texts[authoritySecret]), 0o600); err != nil {
		t.Fatal(err)
	}
	second, _ := printed(t, "--namespace", "mesh", "--cluster-domain", "corp.example", "--authority", file)
	if _, again := second[authoritySecret]; again || len(first) != 2 || len(second) != 1 {
		t.Errorf("%d Secrets, and then %d, want both, and then the server's", len(first), len(second))
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(first[serverSecret].Data["ca.crt"])
	for i, secret := range []corev1.Secret{first[serverSecret], second[serverSecret]} {
		pair, err := tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"nametap-discovery.mesh", "nametap-discovery.mesh.svc", "nametap-discovery.mesh.svc.corp.example"} {
			if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
				t.Errorf("certificate %d: %v", i, err)
			}
		}
	}
	if bytes.Equal(first[serverSecret].Data["tls.crt"], second[serverSecret].Data["tls.crt"]) {
		t.Error("the second certificate is the first one")
	}
}
