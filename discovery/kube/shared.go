package kube

import "slices"

// Resources that more than one file reads.
const (
	secrets    = "secrets"
	configMaps = "configmaps"
)

// ignore returns err, or nil if err is of one of the kinds.
func ignore(err error, kinds ...func(error) bool) error {
	if err != nil && slices.ContainsFunc(kinds, func(is func(error) bool) bool { return is(err) }) {
		return nil
	}
	return err
}
