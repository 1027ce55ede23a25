package version

import (
	"runtime/debug"
	"strings"
	"testing"
)

// A version has the commit once, regardless of the form that Go gives it.
func TestString(t *testing.T) {
	const commit = "4faed3a9c1b2d3e4f5a6b7c8d9e0f1a2b3c4d5e6"
	revision := debug.BuildSetting{Key: "vcs.revision", Value: commit}
	for _, test := range []struct {
		release, module string
		settings        []debug.BuildSetting
		want            string
	}{
		{"", "", nil, "devel"},
		{"", "(devel)", nil, "devel"},
		{"", "v1.2.3", nil, "v1.2.3"},
		{"0.2.0", "", nil, "v0.2.0"},
		{"0.2.0", "v0.0.0-20261121221651-4faed3a9c1b2+dirty", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}, "v0.2.0-4faed3a9c1b2+dirty"},
		{"0.2.0", "v0.2.0", []debug.BuildSetting{revision}, "v0.2.0-4faed3a9c1b2"},
		{"", "(devel)", []debug.BuildSetting{revision}, "devel-4faed3a9c1b2"},
		{"", "(devel)", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}, "devel-4faed3a9c1b2+dirty"},
		{"", "v1.2.3", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "false"}}, "v1.2.3-4faed3a9c1b2"},
		{"", "v0.0.0-20261121221651-4faed3a9c1b2+dirty", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}},
			"v0.0.0-20261121221651-4faed3a9c1b2+dirty"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: test.module}, Settings: test.settings}
		if got := fromInfo(test.release, info).String(); got != test.want {
			t.Errorf("%s %v: got %s, want %s", test.module, test.settings, got, test.want)
		}
	}
}

// The version names the FIPS 140-3 module of the build.
func TestToolchain(t *testing.T) {
	info := &debug.BuildInfo{Settings: []debug.BuildSetting{{Key: "GOFIPS140", Value: "v1.0.0"}}}
	if got := fromInfo("", info).Toolchain(); !strings.HasSuffix(got, ", FIPS 140-3 module v1.0.0") {
		t.Error(got)
	}
}

// A build of a release has the documents of that release.
func TestDocument(t *testing.T) {
	const repository = "https://github.com/nametap/nametap/blob/"
	for version, want := range map[string]string{
		"v1.2.3":                             repository + "v1.2.3/docs/behaviour.md#n5",
		"devel":                              repository + "main/docs/behaviour.md#n5",
		"v1.2.3+dirty":                       repository + "main/docs/behaviour.md#n5",
		"v0.0.0-20261121221651-4faed3a9c1b2": repository + "main/docs/behaviour.md#n5",
	} {
		if got := document(&debug.BuildInfo{Main: debug.Module{Version: version}}, "docs/behaviour.md#n5"); got != want {
			t.Errorf("%s: got %s, want %s", version, got, want)
		}
	}
}

// A build's images are the images of its release, of its tag, or of the next release.
func TestRelease(t *testing.T) {
	for _, test := range [][3]string{
		{"0.2.0", "v0.1.9", "0.2.0"}, {"", "v0.1.9", "0.1.9"}, {"", "v0.1.9+dirty", upcoming},
		{"", "v0.0.0-20261121221651-4faed3a9c1b2", upcoming}, {"", "(devel)", upcoming}, {"0.2.0-rc.1", "", "0.2.0-rc.1"},
	} {
		if got := releaseOf(test[0], &debug.BuildInfo{Main: debug.Module{Version: test[1]}}); got != test[2] {
			t.Errorf("%q: got %s", test, got)
		}
	}
}
