// Package examples holds a small shop as Kubernetes and Istio objects, for
// demonstrations and tests. The same files work with kubectl.
package examples

import "embed"

// Files holds the YAML files below "shop", to be given to a control plane as
// its configuration directory.
//
//go:embed shop
var Files embed.FS
