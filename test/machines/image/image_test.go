package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/test/machines/lab"
)

const (
	root = "../../.."
	// version is the VERSION of all images. No file has it.
	version = "9.8.7"
)

// images are the names of the images by their stages in the Dockerfile. The agent's is built by default.
func images() map[string]string {
	return map[string]string{"": "nametap", "init": "nametap-init", "discovery": "nametap-discovery"}
}

// TestDockerfile builds the last commit by `make image`, and by buildah from the Dockerfile. The
// images have the same files, byte for byte, and the same configuration. TestNode runs those of `make image`. P17.
func TestDockerfile(t *testing.T) {
	check(t)
	dir := t.TempDir()
	sources, fresh := filepath.Join(dir, "sources"), filepath.Join(dir, "fresh")
	output(t, "git", "clone", "--quiet", "--no-hardlinks", root, sources)
	output(t, "git", "clone", "--quiet", "--no-hardlinks", sources, fresh) // without packages of Debian
	if _, err := os.Stat(filepath.Join(root, "bin/debs")); err == nil {
		output(t, "mkdir", sources+"/bin")
		output(t, "cp", "-R", filepath.Join(root, "bin/debs"), sources+"/bin/")
	}
	output(t, "make", "--silent", "--directory="+sources, "image", "VERSION="+version, "ARCHES="+runtime.GOARCH)
	e := newEngine(t, dir, fresh)
	for stage, name := range images() {
		want := e.read(e.run(`cd "$1" && buildah pull --quiet "oci:images/$2"`, filepath.Join(sources, "bin"), name))
		got := e.read(e.build(stage))
		if !strings.Contains(want, "org.opencontainers.image.version:"+version) || strings.Count(want, "\n") < 3 {
			t.Errorf("%s of make image has\n%s", name, want)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s by make image (-) and by the Dockerfile (+):\n%s", name, diff)
		}
	}
}

// check fails the test if the machine lacks something.
func check(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root, for file systems of its own; run the target as root")
	}
	var missing []error
	for _, command := range []string{"buildah", "debootstrap", "unshare", "git", "make", "go"} {
		if _, err := exec.LookPath(command); err != nil {
			missing = append(missing, fmt.Errorf("this test needs a command: %w", err))
		}
	}
	if err := errors.Join(missing...); err != nil {
		t.Fatal(err)
	}
}

// output runs a command, which must succeed, and returns its output.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	var stderr strings.Builder
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s%s", cmd, err, text, &stderr)
	}
	return strings.TrimSpace(string(text))
}

// An engine is buildah with a storage of its own, which has the base image of the Dockerfile. Its mounts end with
// each command.
type engine struct {
	t       *testing.T
	dir     string
	context string
	volumes []string
}

func newEngine(t *testing.T, dir, context string) *engine {
	t.Helper()
	e := &engine{t: t, dir: dir, context: context}
	name := baseImage(t, filepath.Join(context, "Dockerfile"))
	// Go finds the modules and what it has compiled before. These are all that it needs of the network.
	output(t, "go", "-C", context, "mod", "download")
	output(t, "go", "-C", filepath.Join(context, "tools/image"), "mod", "download")
	e.volumes = []string{
		"--volume=" + output(t, "go", "env", "GOMODCACHE") + ":/go/pkg/mod",
		"--volume=" + output(t, "go", "env", "GOCACHE") + ":/root/.cache/go-build",
	}
	// buildah has a cache outside of its storage.
	const elsewhere = "/var/lib/containers"
	if _, err := os.Stat(elsewhere); errors.Is(err, fs.ErrNotExist) {
		t.Cleanup(func() {
			if err := os.RemoveAll(elsewhere); err != nil {
				t.Error(err)
			}
		})
	}
	container := e.buildah("from", "scratch")
	e.buildah("add", "--quiet", container, goBase(t, name), "/")
	e.buildah("config", "--env=GOPATH=/go", "--env=GOTOOLCHAIN=local",
		"--env=PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
	e.buildah("commit", "--quiet", "--rm", container, name)
	return e
}

// buildah runs a command of buildah with the driver of storage that costs least, overlay. vfs copies the base image
// for each step.
func (e *engine) buildah(args ...string) string {
	e.t.Helper()
	return e.run(`buildah "$@"`, args...)
}

// run runs a shell script, whose commands of buildah have the storage.
func (e *engine) run(script string, args ...string) string {
	e.t.Helper()
	options := `buildah() { command buildah --storage-driver="${STORAGE_DRIVER:-overlay}" --root="$DIR/storage" --runroot="$DIR/run" "$@"; }` + "\n"
	return output(e.t, "unshare", append([]string{"--mount", "--propagation=private", "env", "DIR=" + e.dir, "sh", "-euc", options + script, "sh"}, args...)...)
}

// read returns the configuration of an image, and the type, mode, owner, target and SHA-256 of each of its files.
func (e *engine) read(image string) string {
	e.t.Helper()
	return e.run(`buildah inspect --type=image --format='{{printf "%+v\n" .OCIv1.Config}}' "$1" | sed 's|WorkingDir: |WorkingDir:/ |'
container=$(buildah from --pull-never "$1")
cd "$(buildah mount "$container")"
find . -mindepth 1 -printf '%P %y %m %U:%G %l\n' | sort
find . -type f -exec sha256sum {} + | sort -k 2`, image)
}

// build builds a stage of the Dockerfile, and returns the name of the image.
func (e *engine) build(stage string) string {
	e.t.Helper()
	begun := time.Now()
	name := images()[stage]
	args := append([]string{"bud", "--isolation=chroot", "--pull-never", "--layers", "--identity-label=false", "--tag=" + name, "--build-arg=VERSION=" + version}, e.volumes...)
	if stage != "" {
		args = append(args, "--target="+stage)
	}
	e.buildah(append(args, e.context)...)
	e.t.Logf("built %s from the Dockerfile in %v", name, time.Since(begun).Round(time.Second))
	return name
}

var from = regexp.MustCompile(`(?m)^FROM (\S+)(?: AS (\S+))?$`)

// baseImage returns the only image of a Dockerfile that is neither empty nor one of its stages.
func baseImage(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{"scratch": true}
	var bases []string
	for _, match := range from.FindAllStringSubmatch(string(text), -1) {
		if !known[match[1]] {
			bases = append(bases, match[1])
		}
		known[match[2]] = true
	}
	if len(bases) != 1 || !strings.HasPrefix(bases[0], "golang:") {
		t.Fatalf("the Dockerfile has the base images %q, want one of Go", bases)
	}
	return bases[0]
}

// goBase returns the root directory of an image such as golang:1.26-trixie: that Debian with git, make and the Go of
// this machine, whose version must be the same. It makes the directory first if the cache has none.
func goBase(t *testing.T, name string) string {
	t.Helper()
	minor, suite, _ := strings.Cut(strings.TrimPrefix(name, "golang:"), "-")
	goVersion := output(t, "go", "env", "GOVERSION")
	if goVersion != "go"+minor && !strings.HasPrefix(goVersion, "go"+minor+".") {
		t.Fatalf("the Dockerfile builds with Go %s, and this machine has %s", minor, goVersion)
	}
	const include = "ca-certificates,git,make"
	dir, err := lab.Cached("golang-image", []string{suite, include, goVersion}, func(dir string) error {
		t.Logf("making a root directory for the image %s with debootstrap in %s, once", name, dir)
		script := `mirror=$("$4/tools/debian-mirror")
debootstrap --variant=minbase --include="$2" "$3" "$1" "$mirror"
rm -rf "$1/usr/share/doc" "$1/usr/share/man" "$1/usr/share/locale" "$1/var/cache/apt" "$1/var/lib/apt/lists"
cp -R "$5" "$1/usr/local/go"
rm -rf "$1/usr/local/go/test"`
		cmd := exec.CommandContext(t.Context(), "sh", "-euc", script, "sh", dir, include, suite, root, output(t, "go", "env", "GOROOT"))
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
