package upstream_test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// F5, F15: valid names of nameservers, and invalid ones.
func TestParseSpec(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{ // "" means the same text
		"192.0.2.53":                           "",
		"192.0.2.53:53":                        "192.0.2.53",
		"192.0.2.53:5353":                      "",
		"2001:db8::53":                         "",
		"[2001:db8::53]":                       "2001:db8::53",
		"[2001:db8::53]:53":                    "2001:db8::53",
		"[2001:db8::53]:5353":                  "",
		"fe80::1%eth0":                         "",
		"::ffff:192.0.2.53":                    "192.0.2.53",
		"tls://192.0.2.53#dns.example":         "",
		"tls://192.0.2.53:853#dns.example.":    "tls://192.0.2.53#dns.example",
		"tls://[2001:db8::1]:8853#dns.example": "",
		"tls://2001:db8::1":                    "",
		"tls://[2001:db8::1]:853":              "tls://2001:db8::1",
	} {
		spec, err := upstream.ParseSpec(text)
		if want == "" {
			want = text
		}
		if err != nil || spec.String() != want {
			t.Errorf("%s: %v, %v", text, spec, err)
		}
		if again, err := upstream.ParseSpec(spec.String()); err != nil || again != spec {
			t.Errorf("%s: %v, %v", spec, again, err)
		}
	}
	for _, text := range []string{
		"", "dns.example", "192.0.2", "192.0.2.53:", "192.0.2.53:0", "192.0.2.53:65536", "192.0.2.53 ", "[192.0.2.53",
		"192.0.2.53#dns.example", "tls://", "tls://dns.example", "tls://192.0.2.53#", "https://192.0.2.53", "[2001:db8::53]:",
	} {
		spec, err := upstream.ParseSpec(text)
		if err == nil || !strings.Contains(err.Error(), `"`+text+`"`) || !strings.Contains(err.Error(), "want") {
			t.Errorf("%q: %v, %v", text, spec, err)
		}
	}
}
