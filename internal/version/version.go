// Package version describes this build, and has the addresses of its documents.
package version

import (
	"cmp"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// commitLength is the length of the commit in pseudo-versions.
const commitLength = 12

// release is the version of a release, such as 0.2.0. `make` sets it with the linker, from VERSION.
var release string //nolint:gochecknoglobals // the linker sets it

// upcoming is the version of a build that is neither a release nor a tagged commit: VERSION of release.mk.
const upcoming = "0.1.0"

// tagged matches the version of a module whose commit has a tag.
var tagged = regexp.MustCompile(`^v([0-9]+\.[0-9]+\.[0-9]+)$`)

// Release returns the version of the images, the chart and the packages that belong to this build, such as 0.2.0.
func Release() string { return releaseOf(release, buildInfo()) }

func releaseOf(release string, info *debug.BuildInfo) string {
	tag := ""
	if match := tagged.FindStringSubmatch(info.Main.Version); match != nil {
		tag = match[1]
	}
	return cmp.Or(release, tag, upcoming)
}

// Build describes what a binary was built from.
type Build struct {
	// Version is the version of the release, such as v0.2.0. For other builds it is the version of the module: a
	// tag, a pseudo-version, or "devel" if the working copy has neither.
	Version string `json:"version"`
	// Commit is the revision of the working copy, or empty if it is unknown. Dirty is
	// true if the copy had uncommitted changes.
	Commit string `json:"commit,omitempty"`
	Dirty  bool   `json:"dirty,omitempty"`
	Go     string `json:"go"`
	// FIPS is the version of Go's FIPS 140-3 module, such as v1.0.0, if GOFIPS140 has selected it for this build.
	FIPS string `json:"fips140,omitempty"`
}

// Read returns what this binary was built from.
func Read() Build { return fromInfo(release, buildInfo()) }

func buildInfo() *debug.BuildInfo {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return info
}

func fromInfo(release string, info *debug.BuildInfo) Build {
	b := Build{Version: info.Main.Version, Go: runtime.Version()}
	if b.Version == "" || b.Version == "(devel)" {
		b.Version = "devel"
	}
	if release != "" {
		b.Version = "v" + release
	}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			b.Commit = setting.Value
		case "vcs.modified":
			b.Dirty = setting.Value == "true"
		case "GOFIPS140":
			b.FIPS = setting.Value
		}
	}
	return b
}

// String returns the version, and the commit unless the version contains it.
func (b Build) String() string {
	s, commit := b.Version, b.Commit
	if len(commit) > commitLength {
		commit = commit[:commitLength]
	}
	if commit != "" && !strings.Contains(s, commit) {
		s += "-" + commit
	}
	if b.Dirty && !strings.HasSuffix(s, "+dirty") {
		s += "+dirty"
	}
	return s
}

// Toolchain returns the version of Go and that of its FIPS 140-3 module, if the build uses it.
func (b Build) Toolchain() string {
	if b.FIPS == "" {
		return b.Go
	}
	return b.Go + ", FIPS 140-3 module " + b.FIPS
}

// String returns the version of this binary.
func String() string { return Read().String() }

// repository is the address of the repository.
const repository = "https://github.com/nametap/nametap"

// Document returns the address of a document of this version, such as docs/behaviour.md. A
// build of a commit without a tag has the documents of the main branch.
func Document(path string) string { return document(buildInfo(), path) }

func document(info *debug.BuildInfo, path string) string {
	ref := "main"
	if tagged.MatchString(info.Main.Version) {
		ref = info.Main.Version
	}
	return repository + "/blob/" + ref + "/" + path
}

// Metric returns a metric with the value 1 and the build as its labels.
func Metric(name string) prometheus.Collector {
	b := Read()
	m := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: name, Help: "Always 1; the labels name what the binary was built from.",
		ConstLabels: prometheus.Labels{
			"version": b.Version, "commit": b.Commit, "dirty": strconv.FormatBool(b.Dirty), "goversion": b.Go,
		},
	})
	m.Set(1)
	return m
}
