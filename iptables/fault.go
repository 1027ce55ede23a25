package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// The causes for which a tool fails, recognised by its message. Any other error may be
// temporary, so it is retried and reported.
var (
	// The machine does not support something. These are permanent.
	errTool      = errors.New("tool is missing")
	errNoTable   = errors.New("no such table in this kernel")
	errNoFamily  = errors.New("no such address family in this kernel")
	errExtension = errors.New("no such match or target in this kernel or iptables")
	// These are permanent too, but the machine supports what is needed.
	errPermission   = errors.New("not permitted")
	errIncompatible = errors.New("has rules that only the nft tool can read; choose the backend legacy, or keep them in a table of another name")
	// The tool has waited for the lock already.
	errLocked = errors.New("lock is held")
	// Keep repairs this.
	errElsewhere = errors.New("rules of nametap remain in the other backend")
)

// Errors of this package's methods.
var (
	// ErrIncomplete is returned if the rules in the kernel are incomplete: a supported
	// family, or the conntrack zone, is missing for a temporary reason, or rules of nametap
	// remain in the other backend. Keep retries.
	ErrIncomplete = errors.New("capture is incomplete")
	// ErrUnseen is returned if a backend can never be read, so rules of nametap that
	// another process installed may remain there.
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

// isAny reports whether an error is one of targets.
func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

// explain turns the failure of a tool into an error that says what to do. It recognises the
// messages of iptables 1.6 to 1.8.11, which print errors of the kernel as strerror(3) does.
func explain(tool string, err error, stderr string) error {
	message := strings.TrimSpace(stderr)
	has := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(message, text) })
	}
	fail := func(why error, advice string) error {
		return fmt.Errorf("running %s: %w (%w: %q): %s", tool, why, err, message, advice)
	}
	const (
		forTable     = "load the kernel's modules (modprobe -a iptable_nat iptable_raw ip6table_nat ip6table_raw), or use the other backend"
		forExtension = "load the kernel's modules (modprobe -a xt_CT xt_REDIRECT xt_owner xt_comment xt_conntrack xt_hl xt_recent xt_tcpudp nft_compat), and install all extensions of the package iptables"
	)
	switch {
	case has("xtables lock"):
		return fail(errLocked, "another program holds "+lockFile+" for more than "+lockWait+
			" s; fuser -v "+lockFile+" shows which")
	case has("Permission denied", "Operation not permitted", "you must be root"):
		return fail(errPermission, refusal(message))
	case has("Address family not supported by protocol"):
		return fail(errNoFamily, "the other family is captured without it")
	case has("is incompatible, use 'nft' tool"):
		return fail(errNoTable, "the nft tool wrote rules into a table that iptables uses; choose the backend legacy")
	case has("Table does not exist", "iptables who?", "ip6tables who?", "iptables: who?"):
		return fail(errNoTable, forTable)
	case has("unable to initialize table"): // legacy does not say why
		switch family := toolFamily(tool); {
		case !capable(unix.CAP_NET_ADMIN), !capable(unix.CAP_NET_RAW):
			return fail(errPermission, refusal(message))
		case lacksLegacyTable(family, between(message, "table '", "'")):
			return fail(errNoTable, forTable)
		}
	case has("missing kernel module?", "unknown option"),
		has("Couldn't load match", "Couldn't load target") && has("No such file or directory"),
		has("RULE_APPEND failed", "RULE_INSERT failed", "CHAIN_ADD failed", "TABLE_ADD failed", "CHAIN_USER_ADD failed") &&
			has("(No such file or directory)", "(Operation not supported)", "(Protocol not supported)", "(Invalid argument)"):
		return fail(errExtension, forExtension)
	case errors.Is(err, os.ErrPermission), strings.Contains(err.Error(), syscall.SIGSYS.String()):
		return fail(errPermission, refusal(message)) // the program is not allowed to run, or a filter has killed it
	case message == "":
		return fmt.Errorf("running %s: %w", tool, err)
	}
	return fmt.Errorf("running %s: %w: %q", tool, err, message)
}

// toolFamily returns the family that a tool is for, by its name.
func toolFamily(tool string) Family {
	if strings.HasPrefix(tool, "ip6") {
		return IPv6
	}
	return IPv4
}

// between returns the text between two others, or "".
func between(text, before, after string) string {
	_, rest, _ := strings.Cut(text, before)
	found, _, _ := strings.Cut(rest, after)
	return found
}
