package interop

import (
	"net/http"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// token returns a token of the service account "default" of a namespace, as kubelet requests
// them.
func (c *cluster) token(namespace, audience string) string {
	c.tb.Helper()
	account := "/api/v1/namespaces/" + namespace + "/serviceaccounts/default"
	wait.Until(c.tb, "there is "+account, func() bool {
		status, _ := c.try(http.MethodGet, account, "", nil)
		return status == http.StatusOK
	})
	var answer struct{ Status struct{ Token string } }
	c.request(http.MethodPost, account+"/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec": map[string]any{"audiences": []string{audience}, "expirationSeconds": 3600},
	}, &answer)
	return answer.Status.Token
}

// root returns istiod's root certificate, which istiod puts in a ConfigMap of every namespace.
func (c *cluster) root(namespace string) string {
	c.tb.Helper()
	path := "/api/v1/namespaces/" + namespace + "/configmaps/istio-ca-root-cert"
	var answer struct{ Data map[string]string }
	wait.Until(c.tb, "there is "+path, func() bool {
		status, _ := c.try(http.MethodGet, path, "", nil)
		return status == http.StatusOK
	})
	c.get(path, &answer)
	return answer.Data["root-cert.pem"]
}
