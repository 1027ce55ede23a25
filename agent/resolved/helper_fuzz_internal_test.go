package resolved

import (
	"bytes"
	"strings"
	"testing"
)

// FuzzReadRegistration reads a registration as the helper does, which is root. What it accepts has
// a server on this host. V5.
func FuzzReadRegistration(f *testing.F) {
	for _, text := range []string{
		`{"link":7,"server":"127.0.0.1:15053","domains":["cluster.local","svc",""]}`,
		`{"link":-1,"server":"[fe80::1%a\n]:53"}`,
		`{"link":1e3,"server":"[::ffff:127.0.0.1]:1","domains":["a\u0000b","é"]}`,
		`{"server":"127.0.0.1:1","domains":null}{"server":"127.0.0.1:2"}`,
		`{"server":"` + strings.Repeat("a", 10_000) + `"}`,
		"[[[[",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := readRegistration(bytes.NewReader(text))
		if err != nil {
			if len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		if !r.Server.IsValid() || r.Server.Port() == 0 || r.Server.Addr().Zone() != "" {
			t.Errorf("accepted: %+v", r)
		}
	})
}
