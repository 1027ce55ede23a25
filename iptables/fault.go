package iptables

import (
	"context"
	"errors"
	"slices"
)

// The reasons why a tool fails, recognised by its message. Any other error may be temporary, so the tool is run
// again, and the error is reported.
var (
	// The machine does not support something. These errors are permanent.
	errTool      = errors.New("tool is missing")
	errNoTable   = errors.New("no such table in this kernel")
	errNoFamily  = errors.New("no such address family in this kernel")
	errExtension = errors.New("no such match or target in this kernel or iptables")
	// These errors are permanent, too, but the machine supports what is needed.
	errPermission   = errors.New("not permitted")
	errIncompatible = errors.New("has rules that only the nft tool can read: keep them in a table of another name")
	// This error is temporary, but the tool is not run again at once, because it has already waited for the lock.
	errLocked = errors.New("lock is held")
	// The backend that is not used still has rules of nametap. [Capture.Keep] tries again later to remove them.
	errElsewhere = errors.New("rules of nametap remain in the other backend")
)

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

// unsupported reports whether an error means that the machine does not support something.
func unsupported(err error) bool {
	return isAny(err, errTool, errNoTable, errNoFamily, errExtension)
}

// failsAgain reports whether the same attempt would fail again if it were made at once.
func failsAgain(err error) bool {
	return unsupported(err) || isAny(err, errPermission, errIncompatible, errLocked, context.Canceled, context.DeadlineExceeded)
}

// temporary reports whether an attempt may succeed later. That includes attempts that
// have waited for a lock, or for a tool that hangs.
func temporary(err error) bool {
	return err != nil && (!failsAgain(err) || isAny(err, errLocked, context.DeadlineExceeded))
}

// isAny reports whether err is one of targets.
func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
