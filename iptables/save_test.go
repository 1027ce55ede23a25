package iptables

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
)

// The output of iptables-save may have any rule of any program. Whatever it has, the input
// for iptables-restore names only chains of nametap.
func FuzzParseSave(f *testing.F) {
	rules, err := Build(DefaultConfig())
	if err != nil {
		f.Fatal(err)
	}
	seeds, err := filepath.Glob("testdata/*.save")
	if err != nil || len(seeds) == 0 {
		f.Fatalf("seeds %v, %v", seeds, err)
	}
	for _, name := range seeds {
		text, err := os.ReadFile(name)
		if err == nil {
			_, err = parseSave(text)
		}
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := parseSave(text)
		if err != nil {
			return
		}
		lines := make(map[string]bool)
		for line := range strings.Lines(string(text)) {
			if line[0] == '[' {
				_, line, _ = strings.Cut(line, " ")
			}
			lines[strings.TrimRight(line, " \r\n")] = true
		}
		for _, change := range []string{
			rules.change(family.IPv4, s), Rules{}.change(family.IPv4, s), unhookText(s),
		} {
			for line := range strings.Lines(change) {
				if line == "COMMIT\n" || line[0] == '*' {
					continue
				}
				if !strings.Contains(line, ownPrefix) {
					t.Fatalf("%q is of others", line)
				}
				if rule, ok := strings.CutPrefix(line, "-D "); ok && !lines["-A "+strings.TrimRight(rule, "\n")] {
					t.Fatalf("%q deletes what is not there", line)
				}
			}
		}
		if taken := (Rules{}).change(family.IPv4, s); unhookText(s) != "" && taken == "" {
			t.Fatal("jumps to us would stay")
		}
	})
}

func TestParseSaveErrors(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"-A OUTPUT -j ACCEPT\n":       "line 1",
		"*nat\nhello\n":               "line 2",
		"*nat\n: ACCEPT\n":            "line 2",
		"*nat\n-A\n":                  "line 2",
		"*nat\n:A ACCEPT [0]\n":       "unexpected EOF",
		"*nat\nCOMMIT\n:A ACCEPT [0]": "line 3",
		"# Table `nat' is incompatible, use 'nft' tool.\n": "keep them in a table of another name",
	} {
		if _, err := parseSave([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	if s, err := parseSave([]byte("# Table `filter' is incompatible, use 'nft' tool.\n")); err != nil || !s[filterTable].unreadable {
		t.Errorf("a table that capture can do without: %v", err)
	}
	if _, err := parseSave([]byte("# Table `mangle' is incompatible, use 'nft' tool.\n")); err != nil {
		t.Errorf("a table that we do not use: %v", err)
	}
}

// Words in quotes are not targets.
func TestTarget(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string]string{
		`-p udp -j NAMETAP_OUTPUT`: "NAMETAP_OUTPUT",
		`-g OTHER`:                 "OTHER",
		`-m comment --comment "x -j NAMETAP_OUTPUT" -j ACCEPT`:    "ACCEPT",
		`-m comment --comment "x \" -j NAMETAP_OUTPUT" -j ACCEPT`: "ACCEPT",
		`-m comment --comment "-j NAMETAP_OUTPUT"`:                "",
		`-j REDIRECT --to-ports 15053`:                            "REDIRECT",
		``:                                                        "",
	} {
		if got := targetOf(spec); got != want {
			t.Errorf("%s: %q, want %q", spec, got, want)
		}
	}
}
