// Package release tests the packages that `make release` has built in bin/release, with the tools
// of Debian and RPM.
package release
