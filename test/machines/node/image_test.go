package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/test/machines/cache"
	"github.com/nametap/nametap/test/machines/load"
)

// The images that no manifest names.
const (
	pauseImage = "docker.io/library/nt-pause:1"
	loadImage  = "docker.io/library/nt-load:1"
)

// An image is what an image's configuration needs.
type image struct {
	name       string // with its tag
	layers     [][]byte
	entrypoint []string
	cmd        []string
}

// buildImages builds the images of the project by `make image`, and the images for the
// checks. It returns the layouts of the project's images. There is no engine and no
// registry.
func buildImages(t *testing.T) (layouts []string, checks []image) {
	t.Helper()
	begun := time.Now()
	build := exec.CommandContext(t.Context(), "make", "--silent", "--directory=../../..", "image")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, output)
	}
	layouts, err := filepath.Glob("../../../bin/images/*.tar")
	if err != nil || len(layouts) != 3 {
		t.Fatalf("make image has built %q, %v", layouts, err)
	}
	loader, err := load.Build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	debian := readFile(t, debianLayer(t))
	tools := layer(t, map[string]string{"usr/local/bin/nametap-load": loader})
	t.Logf("built the images in %v", time.Since(begun).Round(time.Millisecond))
	return layouts, []image{
		{name: "docker.io/library/debian:12-slim", layers: [][]byte{debian}},
		{name: pauseImage, layers: [][]byte{debian}, entrypoint: []string{"sleep", "infinity"}},
		{name: loadImage, layers: [][]byte{debian, tools}},
	}
}

// importImages imports images into containerd, which then has all images of the manifests. P7.
func (c *cluster) importImages(t *testing.T, layouts []string, checks []image) {
	t.Helper()
	imported := func(write func(io.Writer) error) {
		t.Helper()
		cmd := c.command(t.Context(), ctr("images", "import", "-")...)
		reader, writer := io.Pipe()
		cmd.Stdin = reader
		go func() { writer.CloseWithError(write(writer)) }()
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("importing images: %v\n%s", err, output)
		}
	}
	imported(func(w io.Writer) error { return writeArchive(w, checks) })
	for _, layout := range layouts {
		imported(func(w io.Writer) error {
			file, err := os.Open(layout)
			if err != nil {
				return err
			}
			defer file.Close()
			_, err = io.Copy(w, file)
			return err
		})
	}
	all := strings.Fields(c.output(t, ctr("images", "list", "--quiet")...))
	for _, name := range []string{"nametap", "nametap-init", "nametap-discovery"} {
		if want := imageOf(t, name); !slices.Contains(all, want) {
			t.Fatalf("containerd has the images %q, not %s of the manifests", all, want)
		}
	}
}

// writeArchive writes images as `docker save` does.
func writeArchive(w io.Writer, images []image) error {
	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	archive := tar.NewWriter(w)
	var manifest []entry
	written := map[string]bool{}
	write := func(name string, content []byte) error {
		if written[name] {
			return nil
		}
		written[name] = true
		if err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			return err
		}
		_, err := archive.Write(content)
		return err
	}
	for _, i := range images {
		var layers, ids []string
		for _, content := range i.layers {
			digest := digest(content)
			layers, ids = append(layers, digest+"/layer.tar"), append(ids, "sha256:"+digest)
			if err := write(digest+"/layer.tar", content); err != nil {
				return err
			}
		}
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH, "os": "linux",
			"config": map[string]any{
				"Entrypoint": i.entrypoint, "Cmd": i.cmd,
				"Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			},
			"rootfs": map[string]any{"type": "layers", "diff_ids": ids},
		})
		if err != nil {
			return err
		}
		name := digest(config) + ".json"
		if err := write(name, config); err != nil {
			return err
		}
		manifest = append(manifest, entry{name, []string{i.name}, layers})
	}
	text, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	if err := write("manifest.json", text); err != nil {
		return err
	}
	return archive.Close()
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// layer returns a layer with programs, by their paths in it.
func layer(t *testing.T, programs map[string]string) []byte {
	t.Helper()
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	add := func(header *tar.Header, content []byte) {
		if err := archive.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := archive.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	for path, source := range programs {
		content := readFile(t, source)
		add(&tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}, content)
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// debianLayer returns the path of a tar file of Debian 12 with iptables, and makes it first if
// the cache has none.
func debianLayer(t *testing.T) string {
	t.Helper()
	script := `set -eu
mirror=$(../../../tools/debian-mirror)
debootstrap --variant=minbase --include=iptables bookworm "$1/root" "$mirror"
tar --numeric-owner --directory "$1/root" --create --file "$1/layer.tar" \
	--exclude './dev/*' --exclude './proc/*' --exclude './sys/*' --exclude './var/cache/apt/*' --exclude './var/lib/apt/lists/*' \
	--exclude './usr/share/doc/*' --exclude './usr/share/locale/*' --exclude './usr/share/man/*' .
rm -r "$1/root"`
	dir, err := cache.Dir("debian-layer", []string{script}, func(dir string) error {
		t.Logf("making a layer of Debian with debootstrap in %s, once", dir)
		cmd := exec.CommandContext(t.Context(), "sh", "-c", script, "sh", dir)
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("debootstrap: %w\n%s", err, output)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "layer.tar")
}

// imageOf returns the name and tag of an image of the project in the manifests.
func imageOf(t *testing.T, name string) string {
	t.Helper()
	for _, variant := range []string{"istiod", "discovery"} {
		for line := range strings.Lines(manifest(t, variant)) {
			_, value, found := strings.Cut(strings.TrimSpace(line), "image: ")
			value, _, _ = strings.Cut(value, " #")
			repository, tag, _ := strings.Cut(value, ":")
			if found && filepath.Base(repository) == name {
				if tag == "" {
					tag = "latest"
				}
				if !strings.Contains(repository, "/") {
					repository = "docker.io/library/" + repository
				}
				return repository + ":" + tag
			}
		}
	}
	t.Fatal(fmt.Errorf("no manifest has the image %s", name))
	return ""
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
