package egress

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// startWeb starts an nginx that is both sites, and returns its certificate. It answers with its name, the
// Host and the version of HTTP. /large is a file with the content of large.
func (w *world) startWeb(large string) (cert string) {
	w.TB.Helper()
	cert, key := w.certificate("*.apps.example.org")
	dir := w.Mkdir("nginx", 0)
	if err := os.WriteFile(filepath.Join(dir, "large"), []byte(large), 0o644); err != nil {
		w.TB.Fatal(err)
	}
	var conf strings.Builder
	fmt.Fprintf(&conf, `daemon off; master_process off; user root; pid %s/pid; error_log stderr;
events {}
http {
  access_log off; ssl_certificate %s; ssl_certificate_key %s;
`, dir, cert, key)
	for _, kind := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&conf, "  %s_temp_path %s/%s;\n", kind, dir, kind)
	}
	for _, site := range []string{siteA, siteB} {
		v4, v6 := addresses(site)
		fmt.Fprintf(&conf, `  server {
    listen %[1]s:80; listen [%[2]s]:80; listen %[1]s:443 ssl http2; listen [%[2]s]:443 ssl http2;
    location / { return 200 "%[3]s $host $server_protocol\n"; }
    location = /large { root %[4]s; }
  }
`, v4, v6, site, dir)
	}
	conf.WriteString("}\n")
	w.serve("nginx", "nginx", "-e", "stderr", "-c", w.Write("nginx.conf", conf.String()))
	for _, site := range []string{siteA, siteB} {
		v4, v6 := addresses(site)
		w.await("443", v4, v6)
	}
	return cert
}

// E1, E2, E5: nginx behind a wildcard is reached by curl with HTTP/1.1 and HTTP/2, with and without TLS.
func TestWeb(t *testing.T) {
	w := newWorld(t)
	large := strings.Repeat("0123456789abcdef", 4<<20)
	cert := w.startWeb(large)
	curl := func(options string, args ...string) string {
		return w.client(options, append([]string{"curl", "--silent", "--show-error", "--max-time", "50", "--cacert", cert}, args...)...)
	}
	for _, options := range []string{"", "no-aaaa"} {
		for _, site := range []string{siteA, siteB} {
			for _, test := range []struct{ scheme, version, proto string }{
				{"http", "--http1.1", "HTTP/1.1"}, {"https", "--http1.1", "HTTP/1.1"}, {"https", "--http2", "HTTP/2.0"},
			} {
				if got, want := curl(options, test.version, test.scheme+"://"+site+"/"), site+" "+site+" "+test.proto+"\n"; got != want {
					t.Errorf("curl %s of %s, options %q: %q, want %q", test.version, site, options, got, want)
				}
			}
		}
	}
	file := w.Path("got")
	curl("", "--output", file, "https://"+siteB+"/large")
	if got, err := os.ReadFile(file); err != nil || sha256.Sum256(got) != sha256.Sum256([]byte(large)) {
		t.Errorf("%d bytes of %d, or others, arrived: %v", len(got), len(large), err)
	}
}
