package egress

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"strings"
	"testing"
)

// E2, E3: the host of a request, or why it has none.
func TestHTTPName(t *testing.T) {
	t.Parallel()
	for request, want := range map[string]string{
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                               "a.example.org",
		"GET / HTTP/1.1\nhost:a.example.org:8080\n\n":                                 "a.example.org",
		"POST /x HTTP/1.0\r\nAccept: */*\r\nHOST:  a.example.org \r\n\r\nHost: b\r\n": "a.example.org",
		"GET http://b.example.org:80/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":        "b.example.org",
		"GET /?to=http://b.example.org/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":      "a.example.org",
		"CONNECT b.example.org:443 HTTP/1.1\r\nHost: a.example.org\r\n\r\n":           "b.example.org",
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n":                                   errMore.Error(),
		"VERSION-CONTROL / HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                   "a.example.org",
		"GET":                              errMore.Error(),
		"GET / HTTP/1.1\r\n\r\n":           errNoName.Error(),
		"GET / HTTP/1.1\r\nHost: \r\n\r\n": errNoName.Error(),
		"GET / HTTP/1.1\r\nHost: a.example.org\r\nhost: b.example.org\r\n\r\n": "two Host fields",
		"GET / HTTP/1.1\r\nX: y\r\n Host: a.example.org\r\n\r\n":               "a line of the head is not a field",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n":                                     "HTTP/2 without TLS",
		"SSH-2.0-OpenSSH_9.2p1\r\n":                                            "neither TLS nor HTTP/1",
		"GET / HTTP/3\r\n\r\n":                                                 "not a request of HTTP/1",
		"GET /\r\n\r\n":                                                        "not a request of HTTP/1",
		"\x00\x00\x00\x01":                                                     "neither TLS nor HTTP/1",
		"AVERYVERYLONGMETHODTHATISNOTONE / HTTP/1.1\r\nHost: a.example.org\r\n\r\n":      "neither TLS nor HTTP/1",
		"GET http://user@b.example.org/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":         "b.example.org",
		"OPTIONS * HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                              "a.example.org",
		"GET http://b.example.org?x HTTP/1.1\r\nHost: a.example.org\r\nA: b\r\n\r\nmore": "b.example.org",
	} {
		name, err := httpName([]byte(request))
		got := name
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", request, got, want)
		}
	}
}

// FuzzHTTP compares the name with the host that net/http finds. Where net/http is stricter, the
// server decides.
func FuzzHTTP(f *testing.F) {
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n", "GET http://b.example.org:80/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n",
		"CONNECT b.example.org:443 HTTP/1.1\r\nHost: a.example.org\r\n\r\n",
	} {
		f.Add([]byte(request))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		name, err := httpName(b)
		if err == nil && name == "" {
			t.Error("an empty name without an error")
		}
		request, parseErr := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		if err != nil || parseErr != nil || errors.Is(err, errMore) {
			return
		}
		if want := withoutPort(request.Host); name != want {
			t.Errorf("%q: %q, but net/http finds %q", b, name, want)
		}
	})
}
