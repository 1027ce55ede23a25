package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// fakeBinaries returns options with a binary of each program for two architectures.
func fakeBinaries(t *testing.T) options {
	t.Helper()
	o := options{
		bin: t.TempDir(), out: filepath.Join(t.TempDir(), "images"), image: "nametap", tag: "1.2.3",
		arches: "amd64 arm64", created: time.Unix(1700000000, 0),
	}
	for _, arch := range strings.Fields(o.arches) {
		for _, name := range []string{"nametap", "nametap-discovery", "nametap.licenses.gz", "nametap-discovery.licenses.gz"} {
			path := filepath.Join(o.bin, "linux-"+arch, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(name+arch), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	return o
}

// listing returns the mode and the owner of each file of an image.
func listing(t *testing.T, image v1.Image) map[string]string {
	t.Helper()
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, layer := range layers {
		content, err := layer.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		for archive := tar.NewReader(content); ; {
			header, err := archive.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			all[header.Name] = fmt.Sprintf("%o %d:%d", header.Mode, header.Uid, header.Gid)
		}
	}
	return all
}

// P7: the images of the agent and of nametap-discovery have one program, run as 1337, and can
// write their state. The agent's image has root certificates where Go reads them.
func TestImages(t *testing.T) {
	o := fakeBinaries(t)
	for suffix, want := range map[string]struct {
		config v1.Config
		files  map[string]string
	}{
		"": {
			v1.Config{Entrypoint: []string{"/usr/local/bin/nametap"}, Cmd: []string{"agent"}, User: "1337:1337"},
			map[string]string{
				"usr/local/bin/nametap": "755 0:0", "var/lib/nametap/": "755 1337:1337",
				"etc/ssl/certs/ca-certificates.crt": "644 0:0", "usr/share/doc/nametap/licenses.gz": "644 0:0",
			},
		},
		"-discovery": {
			v1.Config{Entrypoint: []string{"/usr/local/bin/nametap-discovery"}, User: "1337:1337"},
			map[string]string{"usr/local/bin/nametap-discovery": "755 0:0", "var/lib/nametap-discovery/": "755 1337:1337",
				"usr/share/doc/nametap-discovery/licenses.gz": "644 0:0"},
		},
	} {
		image, err := o.build(suffix, "arm64")
		if err != nil {
			t.Fatal(err)
		}
		config, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		got, wanted := config.Config, want.config
		if config.Architecture != "arm64" || fmt.Sprint(got.Entrypoint, got.Cmd, got.User) != fmt.Sprint(wanted.Entrypoint, wanted.Cmd, wanted.User) {
			t.Errorf("image %q has %+v, want %+v", suffix, config, wanted)
		}
		files := listing(t, image)
		for name, attributes := range want.files {
			if files[name] != attributes {
				t.Errorf("image %q: %s has %q, want %q", suffix, name, files[name], attributes)
			}
			delete(files, name)
		}
		for name := range files {
			if !strings.HasSuffix(name, "/") {
				t.Errorf("image %q also has %s", suffix, name)
			}
		}
	}
}

// TestRootCertificates checks that Mozilla's roots are there.
func TestRootCertificates(t *testing.T) {
	if n := strings.Count(string(rootCertificates()), "-----BEGIN CERTIFICATE-----"); n < 100 {
		t.Errorf("%d root certificates, want at least 100", n)
	}
}

// P1: two builds have equal layouts.
func TestEqualBuilds(t *testing.T) {
	o := fakeBinaries(t)
	var digests []string
	for range 2 {
		index, err := o.index("")
		if err != nil {
			t.Fatal(err)
		}
		digest, err := index.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
	}
	if digests[0] != digests[1] {
		t.Errorf("two builds have the digests %v", digests)
	}
}

// P8: the image of the init container has the tools of iptables, their plugins and libraries, their
// licenses, and the packages and the Debian that scanners look for. This test needs the packages that `make image` has downloaded.
func TestTools(t *testing.T) {
	o := fakeBinaries(t)
	o.debs = "../../bin/debs"
	if _, err := os.Stat(filepath.Join(o.debs, "arm64")); err != nil {
		t.Skip("LEFT OUT: no packages of Debian; run `make image`")
	}
	expected := regexp.MustCompile(`^usr/sbin/(xtables-(nft|legacy)-multi|ip6?tables(-nft|-legacy)?(-save|-restore)?)$` +
		`|^(usr/)?lib(64)?/([^/]+/)?(lib[\w.+-]+|ld[\w.-]+)\.so[.\d]*$|^usr/lib/[^/]+/xtables/\w+\.so$` +
		`|^usr/share/doc/[^/]+/(copyright|licenses\.gz)$|^usr/local/bin/nametap$|^etc/os-release$|^var/lib/dpkg/status\.d/[\w-]+$|/$`)
	for _, arch := range strings.Fields(o.arches) {
		image, err := o.build("-init", arch)
		if err != nil {
			t.Fatal(err)
		}
		files := listing(t, image)
		for name := range files {
			if !expected.MatchString(name) {
				t.Errorf("%s: unexpected %s", arch, name)
			}
		}
		for _, name := range []string{
			"iptables-nft-save", "iptables-nft-restore", "ip6tables-nft-save", "ip6tables-nft-restore",
			"iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy-save", "ip6tables-legacy-restore",
			"iptables-restore", "ip6tables-save",
		} {
			if files["usr/sbin/"+name] == "" {
				t.Errorf("%s: %s is missing", arch, name)
			}
		}
		for _, name := range []string{"etc/os-release", "var/lib/dpkg/status.d/iptables", "var/lib/dpkg/status.d/libc6", "var/lib/dpkg/status.d/libxtables12"} {
			if files[name] != "644 0:0" {
				t.Errorf("%s: %s has %q", arch, name, files[name])
			}
		}
		tools, err := toolsOf(filepath.Join(o.debs, arch))
		if err != nil {
			t.Fatal(err)
		}
		list, err := os.ReadFile("debian.list")
		if err != nil {
			t.Fatal(err)
		}
		control := string(tools["var/lib/dpkg/status.d/libc6"].content)
		version := regexp.MustCompile(`(?m)^Version: (.*)$`).FindStringSubmatch(control)
		if version == nil || !strings.Contains(string(list), arch+" libc6 "+version[1]+" ") || !strings.Contains(control, "Package: libc6\n") {
			t.Errorf("%s: libc6 is\n%s", arch, control)
		}
	}
}
