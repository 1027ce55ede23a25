package image

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// An Image has what an engine reads of an image.
type Image struct {
	Config Config
	// Files has type, mode, owner, and SHA-256 or target of each file, by its path without a slash in front.
	Files map[string]string
}

// Config is the part of an image's configuration that decides how it runs. A field that is missing is equal to
// the default.
type Config struct {
	User         string              `json:"User"`
	Entrypoint   []string            `json:"Entrypoint"`
	Cmd          []string            `json:"Cmd"`
	Env          []string            `json:"Env"`
	WorkingDir   string              `json:"WorkingDir"`
	ExposedPorts map[string]struct{} `json:"ExposedPorts"`
	Volumes      map[string]struct{} `json:"Volumes"`
	Labels       map[string]string   `json:"Labels"`
	StopSignal   string              `json:"StopSignal"`
}

// A descriptor is a reference to another file of a layout.
type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Platform  *struct {
		Architecture string `json:"architecture"`
	} `json:"platform"`
}

// Read reads the image for an architecture from the directory of a layout that has one image.
func Read(dir, arch string) (Image, error) {
	next := filepath.Join(dir, "index.json")
	for {
		var manifest struct {
			Manifests []descriptor `json:"manifests"`
			Config    descriptor   `json:"config"`
			Layers    []descriptor `json:"layers"`
		}
		if err := decode(next, &manifest); err != nil {
			return Image{}, err
		}
		if len(manifest.Manifests) == 0 {
			return readManifest(dir, manifest.Config, manifest.Layers)
		}
		next = ""
		for _, d := range manifest.Manifests {
			if d.Platform == nil || d.Platform.Architecture == arch {
				next = d.path(dir)
			}
		}
		if next == "" {
			return Image{}, fmt.Errorf("%s has no image for %s", dir, arch)
		}
	}
}

func (d descriptor) path(dir string) string {
	return filepath.Join(dir, "blobs", strings.ReplaceAll(d.Digest, ":", "/"))
}

func decode(path string, value any) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, value); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func readManifest(dir string, config descriptor, layers []descriptor) (Image, error) {
	var file struct {
		Config Config `json:"config"`
	}
	if err := decode(config.path(dir), &file); err != nil {
		return Image{}, err
	}
	image := Image{Config: file.Config, Files: map[string]string{}}
	if image.Config.WorkingDir == "" {
		image.Config.WorkingDir = "/"
	}
	for _, layer := range layers {
		path := layer.path(dir)
		if err := each(path, image.add); err != nil {
			return Image{}, fmt.Errorf("layer %s: %w", path, err)
		}
	}
	return image, nil
}

// each calls a function for each file of a compressed archive.
func each(path string, use func(*tar.Header, io.Reader) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	content, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	for archive := tar.NewReader(content); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		header.Name = strings.Trim(strings.TrimPrefix(header.Name, "."), "/")
		if err := use(header, archive); err != nil {
			return fmt.Errorf("%s: %w", header.Name, err)
		}
	}
}

func (i Image) add(header *tar.Header, content io.Reader) error {
	if header.Name == "" {
		return nil // the root directory
	}
	if strings.HasPrefix(filepath.Base(header.Name), ".wh.") {
		return errors.New("a layer that removes files is not supported")
	}
	what := ""
	switch header.Typeflag {
	case tar.TypeDir:
		what = "directory"
	case tar.TypeReg:
		hash := sha256.New()
		if _, err := io.Copy(hash, content); err != nil {
			return err
		}
		what = hex.EncodeToString(hash.Sum(nil))
	case tar.TypeSymlink:
		what, header.Mode = "-> "+header.Linkname, 0o777
	default:
		return fmt.Errorf("unexpected type %c", header.Typeflag)
	}
	i.Files[header.Name] = fmt.Sprintf("%04o %d:%d %s", header.Mode&0o7777, header.Uid, header.Gid, what)
	return nil
}
