// Package deploy has the files to run nametap on VMs and in Kubernetes. Its tests check them as texts, with
// Kubernetes' API types. The package test/deploy checks them with the binaries and systemd's tools.
package deploy

import (
	"os"
	"testing"
)

// read reads a file.
func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
