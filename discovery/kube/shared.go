package kube

// Resources that more than one file reads.
const (
	secrets    = "secrets"
	configMaps = "configmaps"
)
