// Package release tests the packages that `make release` has built in bin/release, with the tools
// of Debian, RPM and Alpine.
package release
