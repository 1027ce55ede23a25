package iptables

import (
	"errors"
	"slices"
)

// Failures of the tools are of three kinds, recognised by their messages. Any failure that is not of the first two may
// pass: the tool is run again, and the failure is reported.
var (
	// The machine does not support something: a tool, a table, a family, a match or a target.
	errMissing = errors.New("not supported by this machine")
	// The machine may support what is needed, but refuses it.
	errRefused = errors.New("refused")
)

// errIncompatible is how the error ends for a table with rules that iptables cannot read.
const errIncompatible = "has rules that only the nft tool can read: keep them in a table of another name"

// Errors of this package's methods.
var (
	// ErrIncomplete is returned if the rules in the kernel are incomplete: a family or a
	// part of the rules that this machine may support is missing, or rules of nametap
	// remain in the other backend. Keep retries.
	ErrIncomplete = errors.New("capture is incomplete")
	// ErrUnseen is returned if a backend can never be read. If another process has
	// installed rules of nametap there, they remain.
	ErrUnseen = errors.New("rules of nametap may remain in a backend that cannot be read")
	// ErrCapability is returned if this process lacks CAP_NET_ADMIN.
	ErrCapability = errors.New("CAP_NET_ADMIN is missing: give it to this process, in a pod by securityContext.capabilities.add: [NET_ADMIN] with runAsUser: 0, because Kubernetes gives capabilities to root only, in a systemd unit by AmbientCapabilities=CAP_NET_ADMIN, or run it as root")
)

// temporary reports whether an attempt may succeed later.
func temporary(err error) bool { return err != nil && !isAny(err, errMissing, errRefused) }

// isAny reports whether err is one of targets.
func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
