package httpguard_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/nametap/nametap/internal/httpguard"
)

// R5: endpoints that show the mesh's hosts or end the process answer clients on this host
// only.
func TestOtherClients(t *testing.T) {
	guarded := httpguard.LocalOnly(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	for client, want := range map[string]int{
		"127.0.0.1:4000":          http.StatusOK,
		"127.8.9.1:4000":          http.StatusOK,
		"[::1]:4000":              http.StatusOK,
		"[::ffff:127.0.0.1]:4000": http.StatusOK,
		"10.1.2.3:4000":           http.StatusForbidden,
		"[2001:db8::1]:4000":      http.StatusForbidden,
		"[fe80::1%eth0]:4000":     http.StatusForbidden,
		"@":                       http.StatusForbidden,
	} {
		request := httptest.NewRequest(http.MethodGet, "/debug/ndsz", http.NoBody)
		request.RemoteAddr, request.Host = client, "localhost:15020"
		recorder := httptest.NewRecorder()
		guarded.ServeHTTP(recorder, request)
		if recorder.Code != want {
			t.Errorf("client %s: %d, want %d", client, recorder.Code, want)
		}
	}
}
