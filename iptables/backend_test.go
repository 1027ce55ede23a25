package iptables_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/iptables"
)

// holders returns the tools that print rules of ours.
func holders(t *testing.T) string {
	t.Helper()
	var names []string
	for part := range strings.SplitSeq(saves(t), "== ") {
		if strings.Contains(part, "NAMETAP_OUTPUT") {
			name, _, _ := strings.Cut(part, "\n")
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

const (
	inNFT    = "iptables-nft ip6tables-nft"
	inLegacy = "iptables-legacy ip6tables-legacy"
)

// K4
func TestOneBackend(t *testing.T) {
	if !isolated(t) {
		return
	}
	run := func(backend iptables.Backend, want string) {
		t.Helper()
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		for range 3 {
			apply(t, newCapture(t, cfg, new(logBuffer)))
			if got := holders(t); got != want {
				t.Fatalf("with backend %s: in %s, want %s", backend, got, want)
			}
		}
	}
	run(iptables.Auto, inNFT) // Debian's default
	if tables := strings.TrimSpace(sh(t, "cat /proc/net/ip_tables_names /proc/net/ip6_tables_names")); tables != "" {
		t.Errorf("looking made legacy tables: %q", tables)
	}
	run(iptables.Legacy, inLegacy)
	run(iptables.Auto, inLegacy) // they are there
	run(iptables.NFT, inNFT)
	remove(t, newCapture(t, iptables.DefaultConfig(), new(logBuffer)))

	sh(t, "iptables-legacy -t nat -A OUTPUT -d 127.0.0.11 -j ACCEPT") // as Docker does
	run(iptables.Auto, inLegacy)
	sh(t, "iptables-nft -A FORWARD -j DROP; iptables-nft -A FORWARD -j DROP")
	run(iptables.Auto, inNFT)
	remove(t, newCapture(t, iptables.DefaultConfig(), new(logBuffer)))
	if got := holders(t); got != "" {
		t.Errorf("after remove: %s", got)
	}
}

// K4: both backends hold our rules, as after a flip of another version.
func TestRemoveBothBackends(t *testing.T) {
	if !isolated(t) {
		return
	}
	rules, err := iptables.Build(iptables.DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "rules")
	if err := os.WriteFile(text, []byte(rules.Text(iptables.IPv4)), 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, "iptables-nft-restore --noflush <%[1]s; iptables-legacy-restore --noflush <%[1]s", text)
	c := newCapture(t, iptables.DefaultConfig(), new(logBuffer))
	status, err := c.Status(t.Context())
	if err != nil || !status.Families[0].OtherBackend {
		t.Errorf("status %+v, %v", status, err)
	}
	plan, err := c.Plan(t.Context())
	if err != nil || len(plan) < 2 {
		t.Errorf("plan %v, %v", plan, err)
	}
	remove(t, c)
	if got := holders(t); got != "" {
		t.Errorf("after remove: %s", got)
	}
}

// tools makes a directory with those tools and no others, and makes it $PATH. A
// tool that is given a script is that script.
func tools(t *testing.T, names []string, scripts map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range append(names, "sh") {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, script := range scripts {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

const noIPv6 = `echo "ip6tables-restore: can't initialize ip6tables table: Address family not supported by protocol" >&2; exit 3`

// K4: a kernel without IPv6.
func TestFamilyUnavailable(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		tool := "ip6tables-" + string(backend)
		tools(t, nil, map[string]string{tool + "-save": noIPv6, tool + "-restore": noIPv6})
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		log := new(logBuffer)
		c := newCapture(t, cfg, log)
		apply(t, c)
		apply(t, c)
		if n := log.count("DNS over one family is not captured"); n != 1 {
			t.Errorf("said %d times, want once:\n%s", n, log)
		}
		if got := sh(t, "iptables-%s-save", backend); !strings.Contains(got, "REDIRECT") {
			t.Errorf("IPv4:\n%s", got)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Families[0].State != iptables.InPlace || status.Families[1].State != iptables.Unavailable {
			t.Errorf("status %+v, %v", status, err)
		}
		remove(t, c)

		cfg.IPv6 = iptables.On
		strict := newCapture(t, cfg, log)
		if err := strict.Apply(t.Context()); err == nil || !strings.Contains(err.Error(), "IPv6") {
			t.Errorf("with IPv6 on: %v", err)
		}
		if got := sh(t, "iptables-%s-save", backend); strings.Contains(got, "NAMETAP") {
			t.Errorf("after a failed apply:\n%s", got)
		}
	})
}

// K4: IPv6 switched off takes out what was there.
func TestIPv6Off(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		c := newCapture(t, cfg, new(logBuffer))
		apply(t, c)
		cfg.IPv6 = iptables.Off
		if err := c.Reconfigure(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		if got, want := holders(t), "iptables-"+string(backend); got != want {
			t.Errorf("in %s, want %s", got, want)
		}
		status, err := c.Status(t.Context())
		if err != nil || status.Families[1].State != iptables.NotWanted {
			t.Errorf("status %+v, %v", status, err)
		}
	})
}

// K5: without support for zones, or for comments.
func TestWithoutExtensions(t *testing.T) {
	for missing, want := range map[string]string{"CT": "conntrack zone", "comment": "comments"} {
		t.Run(missing, func(t *testing.T) {
			matrix(t, func(l *lab) {
				t := l.t
				libs := t.TempDir()
				sh(t, "cp -rs $(dirname $(ls /usr/lib*/xtables/libxt_CT.so /usr/lib/*/xtables/libxt_CT.so 2>/dev/null | head -1))/. %[1]s; rm %[1]s/libxt_%[2]s.so", libs, missing)
				t.Setenv("XTABLES_LIBDIR", libs)
				l.agent()
				c := l.capture()
				l.want("AU")
				if n := l.log.count(want); n == 0 {
					t.Errorf("nothing is said of %s:\n%s", want, l.log)
				}
				status, err := c.Status(t.Context())
				if err != nil || status.Families[0].State != iptables.InPlace || status.Families[0].Zone != (missing != "CT") {
					t.Errorf("status %+v, %v", status, err)
				}
				if status, err := newCapture(t, l.config(), l.log).Status(t.Context()); err != nil ||
					status.Families[0].State != iptables.InPlace {
					t.Errorf("status of another process %+v, %v", status, err)
				}
				if said := failed(t, c); !strings.Contains(said, want) {
					t.Errorf("check lacks %q: %s", want, said)
				}
				remove(t, c)
				l.want("U")
			})
		})
	}
}

// pathWithout lets scripts stand for tools until the function is called.
func pathWithout(t *testing.T, scripts map[string]string) func() {
	t.Helper()
	before := os.Getenv("PATH")
	tools(t, nil, scripts)
	return func() { t.Setenv("PATH", before) }
}
