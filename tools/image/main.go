// Command image writes the container images of nametap as an OCI layout, without an engine
// and without a base image. Equal inputs give equal bytes.
//
// Every image is for all architectures of the binaries. The images agent and discovery have one static program, and run
// as the user 1337. The image init also has the tools of iptables that tools/debian-root writes, and runs as the user that the
// pod gives it.
//
// With -roots it writes the files of images below a directory instead, for an engine that follows the
// Dockerfile.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is the user and the group of the agent. Its queries pass through the capture rules.
const user = 1337

// options are the flags.
type options struct {
	bin, tools, out string
	roots           string
	image, tag      string
	arches          string
	created         time.Time
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin", "`directory` with linux-ARCH/nametap and linux-ARCH/nametap-discovery")
	flag.StringVar(&o.tools, "tools", "bin/tools", "`directory` with ARCH, whose files the init image gets")
	flag.StringVar(&o.out, "out", "bin/images", "`directory` to write")
	flag.StringVar(&o.roots, "roots", "", "`directory` to write the files of the images to, in place of images; the arguments are images: agent, init, discovery")
	flag.StringVar(&o.image, "image", "nametap", "`name` of the agent's image; the others have -init and -discovery behind it")
	flag.StringVar(&o.tag, "tag", "", "`tag` of the images")
	flag.StringVar(&o.arches, "arches", "amd64 arm64", "`architectures`, separated by spaces")
	flag.Parse()
	if err := run(o, os.Getenv("SOURCE_DATE_EPOCH"), flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(o options, epoch string, images []string) error {
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH=%q: want seconds since 1970, such as the output of `git log -1 --format=%%ct`", epoch)
	}
	if o.tag == "" {
		return errors.New("want a tag: set -tag")
	}
	o.created = time.Unix(seconds, 0).UTC()
	if o.roots != "" {
		return o.writeRoots(images)
	}
	if err := os.RemoveAll(o.out); err != nil {
		return err
	}
	for _, suffix := range []string{"", "-init", "-discovery"} {
		index, err := o.index(suffix)
		if err != nil {
			return fmt.Errorf("%s%s: %w", o.image, suffix, err)
		}
		if err := o.write(index, suffix); err != nil {
			return err
		}
	}
	return nil
}

// index returns the image with a suffix for all architectures.
func (o options) index(suffix string) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range strings.Fields(o.arches) {
		image, err := o.build(suffix, arch)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", arch, err)
		}
		platform := &v1.Platform{OS: "linux", Architecture: arch}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
	}
	return index, nil
}

// writeRoots writes the files of images for the one architecture, each to a directory with its name.
func (o options) writeRoots(images []string) error {
	for _, name := range images {
		suffix, known := map[string]string{"agent": "", "init": "-init", "discovery": "-discovery"}[name]
		if !known {
			return fmt.Errorf("%q: want agent, init or discovery", name)
		}
		_, layers, err := o.content(suffix, o.arches)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		dir := filepath.Join(o.roots, name)
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		for _, layer := range layers {
			if err := layer.write(dir, o.created); err != nil {
				return err
			}
		}
	}
	return nil
}

// build returns the image with a suffix for one architecture.
func (o options) build(suffix, arch string) (v1.Image, error) {
	config, layers, err := o.content(suffix, arch)
	if err != nil {
		return nil, err
	}
	return o.assemble(arch, config, layers)
}

// content returns the configuration and the layers of the image with a suffix.
func (o options) content(suffix, arch string) (v1.Config, []files, error) {
	config := v1.Config{
		Env:    []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Labels: map[string]string{"org.opencontainers.image.version": o.tag},
	}
	program, layers, err := "nametap"+suffix, []files(nil), error(nil)
	switch suffix {
	case "":
		config.Cmd = []string{"agent"}
		config.ExposedPorts = ports("15053/udp", "15053/tcp", "15020/tcp")
		layers = []files{{
			"etc/ssl/certs/ca-certificates.crt": {mode: 0o644, content: rootCertificates()},
			"var/lib/nametap":                   {dir: true, mode: 0o755, owner: user},
		}}
	case "-init":
		program, config.Cmd = "nametap", []string{"capture", "apply"}
		tools, err := readFiles(filepath.Join(o.tools, arch))
		if err != nil {
			return v1.Config{}, nil, err
		}
		layers = []files{tools}
	case "-discovery":
		config.ExposedPorts = ports("15010/tcp", "15012/tcp", "15014/tcp")
		layers = []files{{"var/lib/nametap-discovery": {dir: true, mode: 0o755, owner: user}}}
	}
	if suffix != "-init" {
		config.User = fmt.Sprintf("%d:%d", user, user)
	}
	path := "usr/local/bin/" + program
	config.Entrypoint = []string{"/" + path}
	binary, err := os.ReadFile(filepath.Join(o.bin, "linux-"+arch, program))
	if err != nil {
		return v1.Config{}, nil, err
	}
	notices, err := os.ReadFile(filepath.Join(o.bin, "linux-"+arch, program+".licenses.gz"))
	if err != nil {
		return v1.Config{}, nil, err
	}
	layers = append(layers, files{
		path: {mode: 0o755, content: binary},
		"usr/share/doc/" + program + "/licenses.gz": {mode: 0o644, content: notices},
	})
	return config, layers, nil
}

func ports(names ...string) map[string]struct{} {
	set := map[string]struct{}{}
	for _, name := range names {
		set[name] = struct{}{}
	}
	return set
}

// assemble returns an image with a configuration and layers.
func (o options) assemble(arch string, config v1.Config, layers []files) (v1.Image, error) {
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.ConfigFile(image, &v1.ConfigFile{
		OS: "linux", Architecture: arch, Created: v1.Time{Time: o.created}, Config: config,
		RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return nil, err
	}
	for _, content := range layers {
		layer, err := content.layer(o.created)
		if err != nil {
			return nil, err
		}
		history := v1.History{Created: v1.Time{Time: o.created}, CreatedBy: "make image"}
		if image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: history}); err != nil {
			return nil, err
		}
	}
	return image, nil
}

// write writes an index as an OCI layout, once as a directory and once as a tar file. It adds the name by which
// containerd imports the image.
func (o options) write(index v1.ImageIndex, suffix string) error {
	reference, err := name.NewTag(o.image + suffix + ":" + o.tag)
	if err != nil {
		return err
	}
	full := strings.TrimPrefix(reference.Name(), "index.") // containerd's name of Docker Hub
	dir := filepath.Join(o.out, filepath.Base(o.image)+cmp.Or(suffix, ""))
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	err = path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          full,
		"org.opencontainers.image.ref.name": o.tag,
	}))
	if err != nil {
		return err
	}
	if err := archive(dir, dir+".tar", o.created); err != nil {
		return err
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	_, err = fmt.Printf("%s %s\n", full, digest)
	return err
}
