// Package decode turns Kubernetes and Istio objects into the model that all sources share (package object). Every source
// has its objects as JSON: the API server sends it, and package files makes it of YAML. So an object means the same in
// all sources, and an error names the field in the same words.
//
// decode.go has [Decode]. forms.go has the fields that are read, a struct for each kind of object, and how they
// are checked.
package decode
