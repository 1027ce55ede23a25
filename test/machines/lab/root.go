package lab

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// suite is Debian 12.
const suite = "bookworm"

// base lists the packages of every machine besides the essential ones.
func base() []string {
	return []string{"systemd", "systemd-sysv", "dbus", "kmod", "iproute2", "iptables", "nftables", "procps"}
}

// layer installs packages into a directory of changes to a root directory.
//
//go:embed layer.sh
var layer string

// mirror returns the address of a mirror of Debian: DEBIAN_MIRROR, or the mirror that apt of this
// machine uses.
func mirror(ctx context.Context) (string, error) {
	address, err := exec.CommandContext(ctx, filepath.Join(Repository(), "tools/debian-mirror")).Output()
	if err != nil {
		return "", fmt.Errorf("asking apt for its mirror: %w", err)
	}
	return strings.TrimSpace(string(address)), nil
}

// roots returns the directories of a Debian with packages, the uppermost first. It takes
// them from the cache, or makes them, which takes minutes.
func roots(tb testing.TB, packages []string) []string {
	tb.Helper()
	include := strings.Join(base(), ",")
	root, err := Cached("debian", []string{suite, include}, func(dir string) error {
		tb.Logf("making a root directory of Debian with debootstrap in %s, once", dir)
		address, err := mirror(tb.Context())
		if err != nil {
			return err
		}
		return run(tb.Context(), "debootstrap", "--variant=minbase", "--include="+include, suite, dir, address)
	})
	if err != nil {
		tb.Fatal(err)
	}
	if len(packages) == 0 {
		return []string{root}
	}
	packages = slices.Compact(slices.Sorted(slices.Values(packages)))
	recipe := append([]string{root, layer}, packages...)
	upper, err := Cached("debian-packages", recipe, func(dir string) error {
		tb.Logf("installing %s in %s, once", strings.Join(packages, " "), dir)
		return run(tb.Context(), "unshare", append([]string{"--mount", "--propagation", "private",
			"sh", "-euc", layer, "layer.sh", root, dir}, packages...)...)
	})
	if err != nil {
		tb.Fatal(err)
	}
	return []string{upper, root}
}

// run runs a command; its output is in the error.
func run(ctx context.Context, name string, args ...string) error {
	if output, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("running %s: %w\n%s", name, err, output)
	}
	return nil
}
