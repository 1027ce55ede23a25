package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
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

// P8: the image of the init container has the tools of iptables, their plugins and libraries, their
// licenses, and the packages and the Debian that scanners look for.
func TestTools(t *testing.T) {
	o := fakeBinaries(t)
	o.tools = "../../bin/tools" // of `make image`
	list, err := os.ReadFile("debian.list")
	if err != nil {
		t.Fatal(err)
	}
	arches, err := os.ReadDir(o.tools)
	if err != nil {
		t.Fatalf("this test needs the tools of Debian: run make image: %v", err)
	}
	for _, arch := range arches {
		t.Run(arch.Name(), func(t *testing.T) { checkTools(t, o, arch.Name(), string(list)) })
	}
}

// checkTools checks the image of the init container for one architecture. list has the versions of packages.
func checkTools(t *testing.T, o options, arch, list string) {
	expected := regexp.MustCompile(`^usr/sbin/(xtables-(nft|legacy)-multi|ip6?tables(-nft|-legacy)?(-save|-restore)?)$` +
		`|^usr/lib(64)?/([^/]+/)?(lib[\w.+-]+|ld[\w.-]+)\.so[.\d]*$|^usr/lib/[^/]+/xtables/\w+\.so$|^lib(64)?$|^(etc|usr/lib)/os-release$` +
		`|^usr/share/doc/[^/]+/copyright$|^usr/share/common-licenses/L?GPL(-[\d.]+)?$|^usr/share/common-licenses/Artistic$` +
		`|^usr/share/doc/nametap/licenses\.gz$|^usr/share/doc/nametap-init/sources$|^usr/local/bin/nametap$|^var/lib/dpkg/status\.d/[\w-]+$|/$`)
	image, err := o.build("-init", arch)
	if err != nil {
		t.Fatal(err)
	}
	listed := listing(t, image)
	for name := range listed {
		if !expected.MatchString(name) {
			t.Errorf("unexpected %s", name)
		}
	}
	var wanted []string
	for _, tool := range []string{"iptables", "ip6tables"} {
		for _, backend := range []string{"", "-nft", "-legacy"} {
			wanted = append(wanted, "usr/sbin/"+tool+backend+"-save", "usr/sbin/"+tool+backend+"-restore")
		}
	}
	loader := map[string]string{"amd64": "usr/lib64/ld-linux-x86-64.so.2", "arm64": "usr/lib/ld-linux-aarch64.so.1"}[arch]
	wanted = append(wanted, "etc/os-release", "usr/lib/os-release", loader, strings.Split(loader, "/")[1], "usr/share/common-licenses/GPL-2")
	for _, name := range wanted {
		if listed[name] == "" {
			t.Errorf("%s is missing", name)
		}
	}
	for _, name := range []string{"var/lib/dpkg/status.d/iptables", "var/lib/dpkg/status.d/libc6", "var/lib/dpkg/status.d/libxtables12"} {
		if listed[name] != "644 0:0" {
			t.Errorf("%s has %q", name, listed[name])
		}
	}
	tools, err := readFiles(filepath.Join(o.tools, arch))
	if err != nil {
		t.Fatal(err)
	}
	for name, entry := range tools {
		if entry.link == "" || name == "lib" || name == "lib64" {
			continue
		}
		if _, exists := tools[path.Join(path.Dir(name), entry.link)]; !exists {
			t.Errorf("%s links to %s, which is missing", name, entry.link)
		}
	}
	checkDebian(t, tools, list)
}

// checkDebian checks what the image says of its packages: versions, sources, licenses.
func checkDebian(t *testing.T, tools files, list string) {
	t.Helper()
	control := string(tools["var/lib/dpkg/status.d/libc6"].content)
	version := regexp.MustCompile(`(?m)^Version: (.*)$`).FindStringSubmatch(control)
	if version == nil || !strings.Contains(list, "libc6 "+version[1]+" ") || !strings.Contains(control, "Package: libc6\n") {
		t.Fatalf("libc6 is\n%s", control)
	}
	if release := string(tools["usr/lib/os-release"].content); !strings.Contains(release, "VERSION_CODENAME=trixie\n") {
		t.Errorf("the Debian is\n%s", release)
	}
	sources := string(tools["usr/share/doc/nametap-init/sources"].content)
	if !strings.Contains(sources, "\nglibc "+version[1]+"\n") || strings.Count(sources, "\niptables ") != 1 {
		t.Errorf("the sources are\n%s", sources)
	}
	referred := regexp.MustCompile(`common-licenses/([A-Za-z]+(-[\d.]*\d)?)`)
	for name, entry := range tools {
		for _, match := range referred.FindAllStringSubmatch(string(entry.content), -1) {
			if _, exists := tools["usr/share/common-licenses/"+match[1]]; !exists && path.Base(name) == "copyright" {
				t.Errorf("%s refers to the license %s, which is missing", name, match[1])
			}
		}
	}
}
