package load

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Build builds the command nametap-load, a static binary, in a directory and returns its
// path. It works in tests of this module.
func Build(ctx context.Context, dir string) (string, error) {
	path := filepath.Join(dir, "nametap-load")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, "github.com/nametap/nametap/test/machines/load/nametap-load")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", build, err, output)
	}
	return path, nil
}
