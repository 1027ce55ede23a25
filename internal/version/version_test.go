package version

import (
	"runtime/debug"
	"testing"
)

// A version has the commit once, regardless of the form that Go gives it.
func TestString(t *testing.T) {
	const commit = "4faed3a9c1b2d3e4f5a6b7c8d9e0f1a2b3c4d5e6"
	revision := debug.BuildSetting{Key: "vcs.revision", Value: commit}
	for _, test := range []struct {
		module   string
		settings []debug.BuildSetting
		want     string
	}{
		{"", nil, "devel"},
		{"(devel)", nil, "devel"},
		{"v1.2.3", nil, "v1.2.3"},
		{"(devel)", []debug.BuildSetting{revision}, "devel-4faed3a9c1b2"},
		{"(devel)", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}, "devel-4faed3a9c1b2+dirty"},
		{"v1.2.3", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "false"}}, "v1.2.3-4faed3a9c1b2"},
		{"v0.0.0-20261121221651-4faed3a9c1b2+dirty", []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}},
			"v0.0.0-20261121221651-4faed3a9c1b2+dirty"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: test.module}, Settings: test.settings}
		if got := fromInfo(info).String(); got != test.want {
			t.Errorf("%s %v: got %s, want %s", test.module, test.settings, got, test.want)
		}
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
		if got := (Build{Version: version}).document("docs/behaviour.md#n5"); got != want {
			t.Errorf("%s: got %s, want %s", version, got, want)
		}
	}
}
