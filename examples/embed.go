// Package examples has a small shop as Kubernetes and Istio objects, for demonstrations and
// tests. The files also work with kubectl.
package examples

import "embed"

// Files has the YAML files below "shop", for the configuration directory of a control plane.
//
//go:embed shop
var Files embed.FS
