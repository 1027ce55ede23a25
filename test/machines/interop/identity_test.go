package interop

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// audience is the audience of tokens that istiod accepts.
const audience = "istio-ca"

// account returns the path of the service account "default" of a namespace, once it exists.
func (c *cluster) account(namespace string) string {
	c.tb.Helper()
	path := "/api/v1/namespaces/" + namespace + "/serviceaccounts/default"
	c.awaitObject(path)
	return path
}

// awaitObject waits for an object that a controller makes.
func (c *cluster) awaitObject(path string) {
	c.tb.Helper()
	wait.Until(c.tb, "there is "+path, func() bool {
		status, _ := c.try(http.MethodGet, path, "", nil)
		return status == http.StatusOK
	})
}

// token returns a token of the service account "default" of a namespace, as kubelet requests
// it.
func (c *cluster) token(namespace, audience string) string {
	c.tb.Helper()
	var answer struct{ Status struct{ Token string } }
	c.request(http.MethodPost, c.account(namespace)+"/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec": map[string]any{"audiences": []string{audience}, "expirationSeconds": 3600},
	}, &answer)
	return answer.Status.Token
}

// shortToken returns a token like token that expires at a time, in whole seconds. The API server
// issues none for less than ten minutes, so the test signs it with the API server's key.
func (c *cluster) shortToken(namespace string, expires time.Time) string {
	c.tb.Helper()
	var account object
	c.get(c.account(namespace), &account)
	part := func(v any) string {
		text, err := json.Marshal(v)
		if err != nil {
			c.tb.Fatal(err)
		}
		return base64.RawURLEncoding.EncodeToString(text)
	}
	issued := time.Now().Add(-time.Hour).Unix()
	text := part(map[string]string{"alg": "RS256", "typ": "JWT"}) + "." + part(map[string]any{
		"iss": issuer, "aud": []string{audience}, "sub": "system:serviceaccount:" + namespace + ":default",
		"iat": issued, "nbf": issued, "exp": expires.Unix(),
		"kubernetes.io": map[string]any{
			"namespace": namespace, "serviceaccount": map[string]string{"name": "default", "uid": account.Metadata.UID},
		},
	})
	sum := sha256.Sum256([]byte(text))
	signature, err := rsa.SignPKCS1v15(rand.Reader, c.key, crypto.SHA256, sum[:])
	if err != nil {
		c.tb.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// root returns istiod's root certificate, which istiod puts in a ConfigMap of every namespace.
func (c *cluster) root(namespace string) string {
	c.tb.Helper()
	path := "/api/v1/namespaces/" + namespace + "/configmaps/istio-ca-root-cert"
	c.awaitObject(path)
	var answer struct{ Data map[string]string }
	c.get(path, &answer)
	return answer.Data["root-cert.pem"]
}

// secure returns the flags for an istiod's port with TLS, without the flags for credentials.
func (m *machine) secure(d *istiod) []string {
	m.tb.Helper()
	return []string{
		"--xds-addr", m.address(d.port(15012)),
		"--xds-root-ca", m.write("root-cert.pem", m.c.root("shop")), "--xds-token-file", "",
	}
}

// project writes a token as kubelet does, and returns its path: the file is a symbolic link into
// a directory that a second link names, and kubelet replaces that link.
func (m *machine) project(token string) string {
	m.tb.Helper()
	dir := m.path("projected")
	version := time.Now().Format("..2006_01_02_15_04_05.000000000")
	m.write("projected/"+version+"/istio-token", token)
	link := func(target, name string) {
		path := filepath.Join(dir, name)
		if err := os.Symlink(target, path+".new"); err != nil {
			m.tb.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			m.tb.Fatal(err)
		}
	}
	link(version, "..data")
	link("..data/istio-token", "istio-token")
	return filepath.Join(dir, "istio-token")
}
