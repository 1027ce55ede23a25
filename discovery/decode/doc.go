// Package decode turns the fields of Kubernetes and Istio objects into the model that all sources share (package
// object). A source shows what it has as a [Value]: a file the nodes of YAML, the API server the types of Kubernetes'
// client. So an object means the same wherever it is from, and an error names the field in the same words.
//
// decode.go has a function for each kind of object; field.go reads the fields.
package decode
