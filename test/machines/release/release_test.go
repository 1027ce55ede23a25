package release_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/leftout"
)

// root is the directory of the repository, and dir the directory of the release.
const (
	root = "../../.."
	dir  = root + "/bin/release"
)

// arches returns the architectures of the release, with their names in rpm: the
// architectures in ARCHES, or all.
func arches() map[string]string {
	all := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}
	if text := os.Getenv("ARCHES"); text != "" {
		maps.DeleteFunc(all, func(arch, _ string) bool { return !slices.Contains(strings.Fields(text), arch) })
	}
	return all
}

// glob returns the files of the release that match a pattern; at least one.
func glob(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("no %s in %s: run `make release` first", pattern, dir)
	}
	return names
}

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	var stderr strings.Builder
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s%s", cmd, err, text, &stderr)
	}
	return string(text)
}

// own are the files that only one format has: the overrides of lintian and the changelog of
// Debian.
var own = regexp.MustCompile(`^/usr/share/(lintian/.*|doc/[^/]+/changelog.*)$`)

// A listing has the mode, owner, group and the SHA-256 or the target of each file by its path.
type listing map[string]string

func (l listing) add(path string, mode int64, owner, content string) {
	if !own.MatchString(path) {
		l[path] = fmt.Sprintf("%04o %s %s", mode&0o7777, owner, content)
	}
}

func sum(t *testing.T, content io.Reader) string {
	t.Helper()
	hash := sha256.New()
	if _, err := io.Copy(hash, content); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

func deb(t *testing.T, path string) listing {
	t.Helper()
	all := listing{}
	for archive := tar.NewReader(strings.NewReader(output(t, "dpkg-deb", "--fsys-tarfile", path))); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		path, owner := strings.TrimPrefix(header.Name, "."), header.Uname+":"+header.Gname
		switch header.Typeflag {
		case tar.TypeSymlink:
			all.add(path, 0o777, owner, "-> "+header.Linkname)
		case tar.TypeReg:
			all.add(path, header.Mode, owner, sum(t, archive))
		}
	}
}

func rpm(t *testing.T, path string) listing {
	t.Helper()
	all := listing{}
	const format = `[%{FILENAMES}\t%{FILEMODES:octal}\t%{FILEUSERNAME}:%{FILEGROUPNAME}\t%{FILEDIGESTS}\t%{FILELINKTOS}\n]`
	for line := range strings.Lines(output(t, "rpm", "--query", "--package", "--nosignature", "--queryformat", format, path)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		var mode int64
		if _, err := fmt.Sscanf(fields[1], "%o", &mode); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		switch mode & 0o170000 {
		case 0o120000:
			all.add(fields[0], 0o777, fields[2], "-> "+fields[4])
		case 0o100000:
			all.add(fields[0], mode, fields[2], fields[3])
		}
	}
	return all
}

// installed returns the files of a directory as if root owned them.
func installed(t *testing.T, top string) listing {
	t.Helper()
	all := listing{}
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		all.add(strings.TrimPrefix(path, top), int64(info.Mode().Perm()), "root:root", sum(t, file))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestFiles compares the files of the deb and the rpm of each architecture: both have the same
// paths, modes, owners and contents, and the package of the agent has what `make install
// PREFIX=/usr` installs. P5.
func TestFiles(t *testing.T) {
	for arch, others := range arches() {
		for _, name := range []string{"nametap", "nametap-discovery"} {
			t.Run(name+" "+arch, func(t *testing.T) {
				want := deb(t, glob(t, name+"_*_"+arch+".deb")[0])
				if diff := cmp.Diff(want, rpm(t, glob(t, name+"-[0-9]*."+others+".rpm")[0])); diff != "" {
					t.Errorf("-deb +rpm:\n%s", diff)
				}
				if name != "nametap" {
					return
				}
				top := t.TempDir()
				output(t, "make", "--silent", "--directory="+root, "install", "BIN=bin/linux-"+arch, "PREFIX=/usr", "DESTDIR="+top)
				all := installed(t, top)
				for path, file := range want {
					if strings.HasPrefix(path, "/usr/share/doc/") || strings.Contains(path, "/vendor-completions/") {
						continue // of the packages
					}
					if all[path] != file {
						t.Errorf("%s: the package has %s, make install %s", path, file, all[path])
					}
				}
				for path := range all {
					if want[path] == "" {
						t.Errorf("the package lacks %s", path)
					}
				}
			})
		}
	}
}

// TestLintian checks that lintian finds no error in the packages of Debian. P6.
func TestLintian(t *testing.T) {
	if _, err := exec.LookPath("lintian"); err != nil {
		leftout.Test(t, "lintian is not installed")
	}
	args := append([]string{"--fail-on", "error", "--tag-display-limit", "0", "--allow-root"}, glob(t, "*.deb")...)
	text, err := exec.CommandContext(t.Context(), "lintian", args...).CombinedOutput()
	t.Logf("%s", text)
	if err != nil {
		t.Errorf("lintian: %v", err)
	}
}

// TestBills checks that each bill of materials lists the modules of the binary beside it, and that the
// packages have this binary. P11.
func TestBills(t *testing.T) {
	for _, bill := range glob(t, "*.cdx.json") {
		binary := strings.TrimSuffix(bill, ".cdx.json")
		content, err := os.ReadFile(binary)
		if err != nil {
			t.Fatal(err)
		}
		digest := sum(t, bytes.NewReader(content))
		text, err := os.ReadFile(bill)
		if err != nil {
			t.Fatal(err)
		}
		var listed struct {
			Components []struct{ Name, Version string }
		}
		if err := json.Unmarshal(text, &listed); err != nil {
			t.Fatalf("%s: %v", bill, err)
		}
		info, err := buildinfo.ReadFile(binary)
		if err != nil {
			t.Fatal(err)
		}
		got, want := map[string]string{}, map[string]string{"std": info.GoVersion}
		for _, c := range listed.Components {
			got[c.Name] = c.Version
		}
		for _, dep := range info.Deps {
			want[dep.Path] = dep.Version
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s lists %v, want %v", bill, got, want)
		}
		name, arch, _ := strings.Cut(filepath.Base(binary), "-linux-")
		if got := deb(t, glob(t, name+"_*_"+arch+".deb")[0])["/usr/bin/"+name]; !strings.HasSuffix(got, digest) {
			t.Errorf("the package %s for %s has the program %s, want %s", name, arch, got, digest)
		}
	}
}
