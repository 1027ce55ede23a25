package kube

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
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
