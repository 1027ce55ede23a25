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
	user       string
}

// buildImages builds the images of the Dockerfile and those for the checks. There is no engine
// and no registry.
func buildImages(t *testing.T) []image {
	t.Helper()
	begun := time.Now()
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", bin+"/",
		"github.com/nametap/nametap/cmd/nametap", "github.com/nametap/nametap/cmd/nametap-discovery")
	build.Dir = "../../.." // the module of the commands
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, output)
	}
	loader, err := load.Build(t.Context(), bin)
	if err != nil {
		t.Fatal(err)
	}
	debian := readFile(t, debianLayer(t))
	agent, discovery := layer(t, map[string]string{"usr/local/bin/nametap": bin + "/nametap"}, "var/lib/nametap"),
		layer(t, map[string]string{"usr/local/bin/nametap-discovery": bin + "/nametap-discovery"}, "var/lib/nametap-discovery")
	tools := layer(t, map[string]string{"usr/local/bin/nametap-load": loader})
	stages := dockerfile(t)
	images := []image{
		{name: imageOf(t, "nametap"), layers: [][]byte{agent}},
		{name: imageOf(t, "nametap-init"), layers: [][]byte{debian, agent}},
		{name: imageOf(t, "nametap-discovery"), layers: [][]byte{discovery}},
		{name: "docker.io/library/debian:12-slim", layers: [][]byte{debian}},
		{name: pauseImage, layers: [][]byte{debian}, entrypoint: []string{"sleep", "infinity"}},
		{name: loadImage, layers: [][]byte{debian, tools}},
	}
	for i, stage := range []string{"agent", "init", "discovery"} {
		images[i].entrypoint, images[i].cmd, images[i].user = stages[stage].entrypoint, stages[stage].cmd, stages[stage].user
	}
	t.Logf("built the images in %v", time.Since(begun).Round(time.Millisecond))
	return images
}

// importImages imports images into containerd.
func (c *cluster) importImages(t *testing.T, images []image) {
	t.Helper()
	cmd := c.command(t.Context(), ctr("images", "import", "-")...)
	reader, writer := io.Pipe()
	cmd.Stdin = reader
	go func() { writer.CloseWithError(writeArchive(writer, images)) }()
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("importing the images: %v\n%s", err, output)
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
				"Entrypoint": i.entrypoint, "Cmd": i.cmd, "User": i.user,
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

// layer returns a layer with programs, by their paths in it, and empty directories of the
// agent's user.
func layer(t *testing.T, programs map[string]string, dirs ...string) []byte {
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
	for _, dir := range dirs {
		add(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, Uid: agentID, Gid: agentID}, nil)
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
debootstrap --variant=minbase --include=iptables bookworm "$1/root" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
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

// dockerfile returns what the stages of the Dockerfile start, and as which user.
func dockerfile(t *testing.T) map[string]image {
	t.Helper()
	stages := map[string]image{}
	name := ""
	for line := range strings.Lines(string(readFile(t, "../../../Dockerfile"))) {
		instruction, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		stage := stages[name]
		var err error
		switch instruction {
		case "FROM":
			_, name, _ = strings.Cut(rest, " AS ")
			stage = image{}
		case "ENTRYPOINT":
			err = json.Unmarshal([]byte(rest), &stage.entrypoint)
		case "CMD":
			err = json.Unmarshal([]byte(rest), &stage.cmd)
		case "USER":
			stage.user = rest
		}
		if err != nil {
			t.Fatalf("Dockerfile: %s: %v", line, err)
		}
		stages[name] = stage
	}
	for _, name := range []string{"agent", "init", "discovery"} {
		if stages[name].entrypoint == nil {
			t.Fatalf("the stage %s of the Dockerfile has no ENTRYPOINT", name)
		}
	}
	return stages
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
