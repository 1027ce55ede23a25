package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery"
)

// D55: a check of objects needs no state. If the automatic VIPs of the default state directory cannot be read, it says so.
// The directory that a user has set must be readable.
func TestStateOfTable(t *testing.T) {
	t.Parallel()
	o := newOptions()
	o.server.ConfigDir, o.server.StateDir, o.client.AutoAllocate = t.TempDir(), t.TempDir(), true
	entry := "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e}, spec: {hosts: [a.example.com], resolution: DNS}}"
	file := filepath.Join(o.server.StateDir, "vips.json")
	// No user can read a directory as a file.
	if err := errors.Join(os.WriteFile(filepath.Join(o.server.ConfigDir, "e.yaml"), []byte(entry), 0o600), os.Mkdir(file, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, given := range []bool{false, true} {
		var stdout, stderr strings.Builder
		o.stateDirGiven = given
		err := printTable(t.Context(), o, &stdout, &stderr)
		if given != errors.Is(err, discovery.ErrVIPs) || given == strings.Contains(stdout.String(), `"240.240.`) {
			t.Errorf("given %t: %v, and printed is %s", given, err, stdout.String())
		}
		if warning := stderr.String(); strings.Contains(warning, file+": is a directory: automatic VIPs are allocated anew") == given {
			t.Errorf("given %t: the warning is %q", given, warning)
		}
	}
}
