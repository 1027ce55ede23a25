package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// TestSignature signs the files of a release. It verifies, and fails for another key, and after
// one byte of any file has changed, a file was removed or another one was added. P11.
func TestSignature(t *testing.T) {
	netns.Need(t, "ssh-keygen", "sha256sum")
	keys := t.TempDir()
	for _, name := range []string{"release", "other"} {
		output(t, command(t, nil, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(keys, name)))
	}
	dir := t.TempDir()
	files := map[string]string{"nametap_0.1.0_amd64.deb": "a package", "nametap-linux-amd64": "a program"}
	for name, text := range files {
		write(t, filepath.Join(dir, name), text)
	}
	output(t, command(t, nil, "../scripts/sums", dir))
	output(t, command(t, nil, "../scripts/sign", filepath.Join(keys, "release"), dir))
	verify := func(key string) error {
		cmd := command(t, nil, "../scripts/verify", filepath.Join(keys, key+".pub"), dir)
		text, err := cmd.CombinedOutput()
		t.Logf("%s", text)
		return err
	}
	refused := func(what string) {
		t.Helper()
		if verify("release") == nil {
			t.Errorf("verified despite %s", what)
		}
	}
	if err := verify("release"); err != nil {
		t.Fatal(err)
	}
	if verify("other") == nil {
		t.Error("verified with another key")
	}
	for _, name := range []string{"nametap_0.1.0_amd64.deb", "nametap-linux-amd64", "SHA256SUMS", "SHA256SUMS.sig"} {
		path := filepath.Join(dir, name)
		text := read(t, path)
		changed := []byte(text)
		changed[len(changed)/2] ^= 1
		write(t, path, string(changed))
		refused("a changed byte of " + name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		refused("the missing " + name)
		write(t, path, text)
	}
	write(t, filepath.Join(dir, "more.rpm"), "a package")
	refused("a file that is not signed")
	if err := os.Remove(filepath.Join(dir, "more.rpm")); err != nil {
		t.Fatal(err)
	}
	if err := verify("release"); err != nil {
		t.Errorf("after all changes were undone: %v", err)
	}
}

// TestMaintainerScripts checks that the shell accepts the scripts of the packages, and that an
// upgrade by dpkg or rpm removes nothing. P3.
func TestMaintainerScripts(t *testing.T) {
	for _, name := range []string{"postinstall", "preremove", "postremove"} {
		output(t, command(t, nil, "sh", "-n", "packages/"+name))
	}
	for _, args := range []string{"upgrade 9.9.9", "failed-upgrade 9.9.9", "1"} {
		// No program is in the PATH, so any command fails.
		cmd := command(t, nil, "/bin/sh", append([]string{"packages/preremove"}, strings.Fields(args)...)...)
		cmd.Env = []string{"PATH=/nonexistent"}
		if said := output(t, cmd); said != "" {
			t.Errorf("preremove %s: %s", args, said)
		}
	}
}

// write writes a file.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
