package deploy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// A release is a directory with two files that are signed, and with the keys.
type release struct {
	t         *testing.T
	keys, dir string
}

const (
	deb     = "nametap_0.1.0-1_amd64.deb"
	program = "nametap-linux-amd64"
)

func newRelease(t *testing.T) release {
	t.Helper()
	netns.Need(t, "ssh-keygen", "sha256sum")
	r := release{t, t.TempDir(), t.TempDir()}
	for _, name := range []string{"release", "other"} {
		output(t, command(t, nil, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(r.keys, name)))
	}
	write(t, r.path(deb), "a package")
	write(t, r.path(program), "a program")
	output(t, command(t, nil, "tools/sums", r.dir))
	r.sign()
	return r
}

func (r release) path(name string) string { return filepath.Join(r.dir, name) }

func (r release) sign() {
	r.t.Helper()
	output(r.t, command(r.t, nil, "tools/sign", filepath.Join(r.keys, "release"), r.dir))
}

func (r release) verify(key string) (said string, err error) {
	r.t.Helper()
	text, err := command(r.t, nil, "tools/verify", filepath.Join(r.keys, key+".pub"), r.dir).CombinedOutput()
	return string(text), err
}

func (r release) accepted() {
	r.t.Helper()
	if said, err := r.verify("release"); err != nil {
		r.t.Fatalf("%v\n%s", err, said)
	}
}

// refused checks that the release does not verify, and that the error has a text.
func (r release) refused(why, text string) {
	r.t.Helper()
	if said, err := r.verify("release"); err == nil || !strings.Contains(said, text) {
		r.t.Errorf("%s: %v, want %q in:\n%s", why, err, text, said)
	}
}

// TestSignature signs the files of a release. It verifies, and fails for another key, and after
// one byte of any file has changed or a file was removed. P11.
func TestSignature(t *testing.T) {
	t.Parallel()
	r := newRelease(t)
	r.accepted()
	if said, err := r.verify("other"); err == nil {
		t.Errorf("verified with another key: %s", said)
	}
	for _, name := range []string{deb, program, "SHA256SUMS", "SHA256SUMS.sig"} {
		text := read(t, r.path(name))
		changed := []byte(text)
		changed[len(changed)/2] ^= 1
		write(t, r.path(name), string(changed))
		r.refused("a changed byte of "+name, name)
		if err := os.Remove(r.path(name)); err != nil {
			t.Fatal(err)
		}
		r.refused("the missing "+name, name+" is missing")
		write(t, r.path(name), text)
	}
	r.accepted()
}

// TestUnsignedFiles adds files that are not signed to a release. Each fails the verification, even
// if its name looks like a pattern that matches names with a signature. P11.
func TestUnsignedFiles(t *testing.T) {
	t.Parallel()
	r := newRelease(t)
	for _, name := range []string{
		"more.rpm", "nametap", "nametap_0.1.0-1_amd64", deb + ".", deb + ".asc", "deb", "0",
		".*", "nametap.*", "nametap_0.1.0-1_amd64.d*", "nametap[_]0.1.0-1_amd64.deb", "nametap_0.1.0-1_amd64.de\\?b",
		deb + "\n", deb + "\n" + program, deb + " ", " " + deb, "-" + deb, "--", "*", "$", ".hidden", "...", "$(id)", "ä",
	} {
		write(t, r.path(name), "not signed")
		r.refused(fmt.Sprintf("the unsigned file %q", name), name)
		if err := os.Remove(r.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	r.accepted()
	for _, name := range []string{"more", ".more", "nametap.*"} {
		if err := os.Mkdir(r.path(name), 0o755); err != nil {
			t.Fatal(err)
		}
		r.refused("the directory "+name, name)
		if err := os.Remove(r.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	elsewhere := filepath.Join(t.TempDir(), deb)
	if err := errors.Join(os.Rename(r.path(deb), elsewhere), os.Symlink(elsewhere, r.path(deb))); err != nil {
		t.Fatal(err)
	}
	r.refused("a link to a file with the right content", "not a regular file")
	if err := os.Remove(r.path(deb)); err != nil {
		t.Fatal(err)
	}
	r.refused("a missing file", deb+" is missing")
	if err := os.Rename(elsewhere, r.path(deb)); err != nil {
		t.Fatal(err)
	}
	r.accepted()
}

// TestSignedLists signs lists that `make release` does not write. P11.
func TestSignedLists(t *testing.T) {
	t.Parallel()
	r := newRelease(t)
	list := read(t, r.path("SHA256SUMS"))
	first, _, _ := strings.Cut(list, "\n")
	digest := first[:64]
	for text, why := range map[string]string{
		"":                  "no file is listed",
		list + first + "\n": program + " is listed twice",
		list + digest[1:] + "0  " + program + "\n":       program + " is listed twice",
		list + digest + "  ../" + deb + "\n":             "../" + deb,
		list + digest + "  /etc/passwd\n":                "/etc/passwd",
		list + digest + "  .hidden\n":                    ".hidden",
		list + digest + "  .*\n":                         ".*",
		list + "\\" + digest + "  a\\nb\n":               "not a SHA-256",
		list + digest[1:] + "  more.deb\n":               "not a SHA-256",
		list + strings.ToUpper(first) + "\n":             "not a SHA-256",
		list + "\n":                                      "not a SHA-256",
		list + "# a comment\n":                           "not a SHA-256",
		list + digest + "  more.deb\n":                   "more.deb is missing",
		first + "\n":                                     "does not list " + r.path(deb),
		strings.ReplaceAll(list, digest, digest[1:]+"0"): program + " has changed",
	} {
		write(t, r.path("SHA256SUMS"), text)
		r.sign()
		r.refused(fmt.Sprintf("the list %q", text), why)
	}
	write(t, r.path("SHA256SUMS"), list)
	r.sign()
	r.accepted()
}
