// Command sbom writes the software bill of materials of each binary, in CycloneDX JSON: the
// modules that `go version -m` prints, and Go's standard library. Equal binaries give equal
// bytes for the same SOURCE_DATE_EPOCH. With -licenses it prints the licenses of these modules, which must be
// distributed with the binary.
package main

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

func main() {
	out := flag.String("out", "", "`file` to write (default: the name of the binary with .cdx.json appended)")
	notices := flag.Bool("licenses", false, "print the licenses and notices of the modules instead")
	flag.Parse()
	err := error(nil)
	if *notices {
		err = printLicenses(flag.Args())
	} else {
		err = run(flag.Args(), *out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func printLicenses(binaries []string) error {
	if len(binaries) != 1 {
		return errors.New("want one binary as argument")
	}
	text, err := licenses(binaries[0])
	if err != nil {
		return err
	}
	_, err = fmt.Print(text)
	return err
}

func run(binaries []string, out string) error {
	if len(binaries) == 0 || out != "" && len(binaries) > 1 {
		return errors.New("want binaries as arguments, and only one of them with -out")
	}
	created, err := epoch()
	if err != nil {
		return err
	}
	for _, binary := range binaries {
		bill, err := describe(binary, created)
		if err != nil {
			return err
		}
		text, err := json.MarshalIndent(bill, "", "  ")
		if err != nil {
			return err
		}
		path := out
		if path == "" {
			path = binary + ".cdx.json"
		}
		if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// epoch returns the time that the environment variable SOURCE_DATE_EPOCH has.
func epoch() (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH=%q: want seconds since 1970, such as the output of `git log -1 --format=%%ct`", text)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// A bom is a bill of materials in CycloneDX, with only the fields that the function describe sets.
type bom struct {
	Format       string      `json:"bomFormat"`
	SpecVersion  string      `json:"specVersion"`
	SerialNumber string      `json:"serialNumber"`
	Version      int         `json:"version"`
	Metadata     metadata    `json:"metadata"`
	Components   []component `json:"components"`
}

type metadata struct {
	Timestamp string    `json:"timestamp"`
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	URL        string     `json:"purl"`
	Hashes     []hash     `json:"hashes,omitempty"`
	Properties []property `json:"properties,omitempty"`
}

type hash struct {
	Algorithm string `json:"alg"`
	Content   string `json:"content"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// describe returns the bill of materials of the binary at path.
func describe(path string, created time.Time) (bom, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return bom{}, fmt.Errorf("reading what %s was built from: %w", path, err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return bom{}, err
	}
	sum := sha256.Sum256(content)
	main := module("application", info.Main.Path, info.Main.Version)
	main.Name = filepath.Base(info.Path)
	main.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum[:])}}
	for _, setting := range info.Settings {
		main.Properties = append(main.Properties, property{"go:" + setting.Key, setting.Value})
	}
	bill := bom{
		Format: "CycloneDX", SpecVersion: "1.6", Version: 1, SerialNumber: serial(sum),
		Metadata:   metadata{created.Format(time.RFC3339), main},
		Components: []component{module("library", "std", strings.TrimPrefix(info.GoVersion, "go"))},
	}
	for _, dep := range info.Deps {
		library, err := dependency(dep)
		if err != nil {
			return bom{}, err
		}
		bill.Components = append(bill.Components, library)
	}
	return bill, nil
}

// dependency returns the component for dep, or for its replacement if it has one.
func dependency(dep *debug.Module) (component, error) {
	if dep.Replace != nil {
		dep = dep.Replace
	}
	library := module("library", dep.Path, dep.Version)
	// The sum is the one in go.sum: a SHA-256 over a list with the name and the SHA-256 of each file of the
	// module.
	if encoded, found := strings.CutPrefix(dep.Sum, "h1:"); found {
		sum, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return component{}, fmt.Errorf("sum of module %s: %w", dep.Path, err)
		}
		library.Properties = []property{{"go:sum", dep.Sum}}
		library.Hashes = []hash{{"SHA-256", hex.EncodeToString(sum)}}
	}
	return library, nil
}

func module(kind, path, version string) component {
	url := "pkg:golang/" + path + "@" + strings.ReplaceAll(version, "+", "%2B")
	return component{Type: kind, Ref: url, Name: path, Version: version, URL: url}
}

// serial returns a UUID of version 8 made from sum.
func serial(sum [sha256.Size]byte) string {
	b := sum[:16]
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
