// Package version describes this build, and has the addresses of its documents.
package version

import (
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// commitLength is the length of the commit in pseudo-versions.
const commitLength = 12

// Build describes what a binary was built from.
type Build struct {
	// Version is the module's: a tag, a pseudo-version, or "devel" for a build of
	// a working copy without one.
	Version string `json:"version"`
	// Commit is the revision of the working copy, or empty if it is unknown. Dirty is set
	// if the copy had uncommitted changes.
	Commit string `json:"commit,omitempty"`
	Dirty  bool   `json:"dirty,omitempty"`
	Go     string `json:"go"`
}

// Read returns what this binary was built from.
func Read() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return fromInfo(info)
}

func fromInfo(info *debug.BuildInfo) Build {
	b := Build{Version: info.Main.Version, Go: runtime.Version()}
	if b.Version == "" || b.Version == "(devel)" {
		b.Version = "devel"
	}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			b.Commit = setting.Value
		case "vcs.modified":
			b.Dirty = setting.Value == "true"
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

// String returns the version of this binary.
func String() string { return Read().String() }

// repository is the address of the repository.
const repository = "https://github.com/nametap/nametap"

// Document returns the address of a document of this version, such as docs/behaviour.md. A
// build that is not a release has the documents of the main branch.
func Document(path string) string { return Read().document(path) }

func (b Build) document(path string) string {
	ref := "main"
	if strings.HasPrefix(b.Version, "v") && !strings.ContainsAny(b.Version, "-+") {
		ref = b.Version
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
