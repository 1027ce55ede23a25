package kube_test

import (
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nametap/nametap/discovery/kube"
)

// TestRedirection checks that the API server of another cluster cannot send requests to another server.
func TestRedirection(t *testing.T) { // D23
	var reached atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer other.Close()
	server := httptest.NewTLSServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	authority := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	access, err := kube.ParseAccess(fmt.Appendf(nil, "{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}], "+
		"users: [{name: u, user: {}}], contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}", server.URL, authority))
	if err != nil {
		t.Fatal(err)
	}
	review, err := access.Reviewer("istio-ca")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := review(t.Context(), "token"); err == nil || !strings.Contains(err.Error(), "redirects to "+`"`+other.URL) || reached.Load() != 0 {
		t.Errorf("%v, and the other server got %d requests", err, reached.Load())
	}
}
