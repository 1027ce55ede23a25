// Package guard has only tests. They run the clients of package managers and languages on a host whose agent guards it, at
// servers in another network namespace with an authority of their own.
package guard
