package kube

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
)

// redirecting is a transport to a server that redirects.
type redirecting struct{}

// RoundTrip answers a request.
func (redirecting) RoundTrip(request *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	http.Redirect(recorder, request, "http://other.test/", http.StatusTemporaryRedirect)
	return recorder.Result(), nil
}

// TestRedirection checks that the API server of another cluster cannot send requests to another server.
func TestRedirection(t *testing.T) { // D23
	access, err := ParseAccess([]byte("{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: 'https://east.test'}}], " +
		"users: [{name: u, user: {}}], contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}"))
	if err != nil {
		t.Fatal(err)
	}
	access.client.Client.Transport = redirecting{}
	_, err = do(t.Context(), access.client.Get())
	if err == nil || !strings.Contains(err.Error(), `redirects to "http://other.test/"`) {
		t.Errorf("got %v", err)
	}
}

// answering is a transport to an API server whose answer depends on the query.
type answering func(query string) string

// RoundTrip answers a request.
func (a answering) RoundTrip(request *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	_, err := recorder.WriteString(a(request.URL.Path + "?" + request.URL.RawQuery))
	return recorder.Result(), err
}

// TestNamespace reads a namespace as the API server has it now.
func TestNamespace(t *testing.T) { // I16
	access, err := newAccess(&rest.Config{Host: "https://api.test"})
	if err != nil {
		t.Fatal(err)
	}
	mode := "rules"
	access.client.Client.Transport = answering(func(query string) string {
		if query != "/api/v1/namespaces?fieldSelector=metadata.name%3Dshop" {
			return `{"items": []}`
		}
		return `{"items": [{"metadata": {"name": "shop", "labels": {"a": "b"}, "annotations": {"nametap.dev/mode": "` + mode + `"}}}]}`
	})
	for _, mode = range []string{"rules", "resolv"} {
		labels, annotations, err := access.Namespace(t.Context(), "shop")
		if err != nil || labels["a"] != "b" || annotations["nametap.dev/mode"] != mode {
			t.Errorf("%v, %v, %v", labels, annotations, err)
		}
	}
	if _, _, err := access.Namespace(t.Context(), "other"); err == nil || !strings.Contains(err.Error(), `no namespace "other"`) {
		t.Errorf("got %v", err)
	}
}
