// Package decode turns the fields of Kubernetes and Istio objects into the model that all sources share (package
// object). A [Value] is a value in the form of its source: a YAML node for an object in a file, or a value of a type of
// Kubernetes' client library for an object from the API server. So an object means the same in all sources, and an
// error names the field in the same words.
//
// decode.go has a function for each kind of object; field.go reads the fields.
package decode
