// Package version says which build this is.
package version

import "runtime/debug"

// String returns the module's version: the tag or pseudo-version it was built
// from, or "devel" for a build of a working copy without one.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "devel"
	}
	return info.Main.Version
}
