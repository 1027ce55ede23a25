package main

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// programs returns the binaries in NAMETAP_BINARIES, or else this test's binary and the binary of
// tools/image, which has modules.
func programs(t *testing.T) []string {
	t.Helper()
	if paths := strings.Fields(os.Getenv("NAMETAP_BINARIES")); len(paths) > 0 {
		return paths
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(t.TempDir(), "image")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-C", "../image", "-o", image, ".").CombinedOutput(); err != nil {
		t.Fatalf("building tools/image: %v\n%s", err, output)
	}
	return []string{self, image}
}

// P11: the bill of materials of a binary lists exactly the modules of `go version -m`.
func TestModules(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	for _, binary := range programs(t) {
		output, err := exec.CommandContext(t.Context(), "go", "version", "-m", binary).Output()
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for line := range strings.Lines(string(output)) {
			fields := strings.Fields(line)
			switch {
			case len(fields) > 2 && fields[0] == "dep":
				want = append(want, fields[1]+"@"+fields[2])
			case len(fields) > 2 && fields[0] == "=>":
				want[len(want)-1] = fields[1] + "@" + fields[2]
			case strings.HasPrefix(line, binary+": go"):
				want = append(want, "std@"+strings.TrimPrefix(fields[1], "go"))
			}
		}
		out := filepath.Join(t.TempDir(), "bill.json")
		if err := run([]string{binary}, out); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		var bill bom
		if err := json.Unmarshal(text, &bill); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, c := range bill.Components {
			got = append(got, c.Name+"@"+c.Version)
		}
		slices.Sort(got)
		slices.Sort(want)
		if len(want) == 0 || !slices.Equal(got, want) {
			t.Errorf("%s:\n got %v\nwant %v", binary, got, want)
		}
		if err := run([]string{binary}, out); err != nil {
			t.Fatal(err)
		}
		if again, err := os.ReadFile(out); err != nil || string(again) != string(text) {
			t.Errorf("%s: a second bill is another (%v)", binary, err)
		}
	}
}

// TestLicenses checks that Go and every module of a binary have a license.
func TestLicenses(t *testing.T) {
	modules := 0
	for _, binary := range programs(t) {
		text, err := licenses(binary)
		if err != nil {
			t.Fatal(err)
		}
		info, err := buildinfo.ReadFile(binary)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(text, "==== Go ") {
			t.Errorf("%s: no license of Go", binary)
		}
		for _, dep := range info.Deps {
			modules++
			if !strings.Contains(text, "==== "+dep.Path+"@"+dep.Version+": ") {
				t.Errorf("%s: no license of %s", binary, dep.Path)
			}
		}
	}
	if modules == 0 {
		t.Error("no binary has a module")
	}
	if err := writeLicenses(&strings.Builder{}, "example.com/none@v1.0.0", t.TempDir()); err == nil || !strings.Contains(err.Error(), "has none") {
		t.Errorf("a module without a license: %v", err)
	}
}
