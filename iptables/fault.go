package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Why a tool failed, as far as its words tell. An error that is none of these is not
// classified: it may pass, so it is retried and reported.
var (
	// These say that the machine lacks something, which lasts.
	errTool      = errors.New("tool is missing")
	errNoTable   = errors.New("no such table in this kernel")
	errNoFamily  = errors.New("no such address family in this kernel")
	errExtension = errors.New("no such match or target in this kernel or iptables")
	// These last, too, but they are not a lack.
	errPermission   = errors.New("not permitted")
	errIncompatible = errors.New("has rules that only the nft tool can read; choose the backend legacy, or keep them in a table of another name")
	// errLocked was waited for already.
	errLocked = errors.New("lock is held")
	// errElsewhere is part of what Run mends.
	errElsewhere = errors.New("rules of nametap remain in the other backend")
)

// Errors of this package's methods.
var (
	// ErrIncomplete says that rules are in, but fewer than this machine could have: a
	// family, or the conntrack zone, is missing for a reason that may pass, or rules of
	// ours remain in the other backend. Run tries again.
	ErrIncomplete = errors.New("capture is incomplete")
	// ErrUnseen says that a backend can never be read, so rules of nametap that another process
	// has put there may remain.
	ErrUnseen = errors.New("rules of nametap may remain where they cannot be seen")
	// ErrCapability says that this process lacks CAP_NET_ADMIN.
	ErrCapability = errors.New("CAP_NET_ADMIN is missing: give it to this process, in a pod by securityContext.capabilities.add: [NET_ADMIN], in a systemd unit by AmbientCapabilities=CAP_NET_ADMIN, or run it as root")
)

// lacks reports whether an error says that the machine lacks something.
func lacks(err error) bool {
	return is(err, errTool, errNoTable, errNoFamily, errExtension)
}

// lasts reports whether an error stays the same when the same is tried again at once.
func lasts(err error) bool {
	return lacks(err) || is(err, errPermission, errIncompatible, errLocked, context.Canceled, context.DeadlineExceeded)
}

// mayPass reports whether what has failed may succeed when it is tried again later: also
// after a lock, or a tool that hangs, was waited for.
func mayPass(err error) bool {
	return err != nil && (!lasts(err) || is(err, errLocked, context.DeadlineExceeded))
}

// is reports whether an error is any of some.
func is(err error, any ...error) bool {
	return slices.ContainsFunc(any, func(target error) bool { return errors.Is(err, target) })
}

// explain returns a tool's failure as an error that says what to do. It knows what
// iptables 1.6 to 1.8.11 print; errors of the kernel are in the words of strerror(3).
func explain(tool string, err error, stderr string) error {
	said := strings.TrimSpace(stderr)
	has := func(texts ...string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(said, text) })
	}
	fail := func(why error, advice string) error {
		return fmt.Errorf("running %s: %w (%w: %q): %s", tool, why, err, said, advice)
	}
	const (
		forPermission = "it takes CAP_NET_ADMIN, and for legacy CAP_NET_RAW and, if not root, CAP_DAC_READ_SEARCH, in the user namespace that owns the network namespace"
		forTable      = "load the kernel's modules (modprobe -a iptable_nat iptable_raw ip6table_nat ip6table_raw), or use the other backend"
		forExtension  = "load the kernel's modules (modprobe -a xt_CT xt_REDIRECT xt_owner xt_comment xt_tcpudp nft_compat), and install all extensions of the package iptables"
	)
	switch {
	case has("xtables lock"):
		return fail(errLocked, "another program holds "+lockFile+" for more than "+lockWait+
			" s; fuser -v "+lockFile+" shows which")
	case has("Permission denied", "Operation not permitted", "you must be root"):
		return fail(errPermission, forPermission)
	case has("Address family not supported by protocol"):
		return fail(errNoFamily, "the other family is captured without it")
	case has("is incompatible, use 'nft' tool"):
		return fail(errNoTable, "the nft tool wrote rules into a table that iptables uses; choose the backend legacy")
	case has("Table does not exist", "iptables who?", "ip6tables who?", "iptables: who?"):
		return fail(errNoTable, forTable)
	case has("unable to initialize table"): // legacy does not say why
		switch family := toolFamily(tool); {
		case !capable(unix.CAP_NET_RAW):
			return fail(errPermission, forPermission)
		case lacksLegacyTable(family, between(said, "table '", "'")):
			return fail(errNoTable, forTable)
		}
	case has("missing kernel module?", "unknown option"),
		has("Couldn't load match", "Couldn't load target") && has("No such file or directory"),
		has("RULE_APPEND failed", "RULE_INSERT failed", "CHAIN_ADD failed", "TABLE_ADD failed", "CHAIN_USER_ADD failed") &&
			has("(No such file or directory)", "(Operation not supported)", "(Protocol not supported)", "(Invalid argument)"):
		return fail(errExtension, forExtension)
	case said == "":
		return fmt.Errorf("running %s: %w", tool, err)
	}
	return fmt.Errorf("running %s: %w: %q", tool, err, said)
}

// toolFamily returns the family of a tool by its name.
func toolFamily(tool string) Family {
	if strings.HasPrefix(tool, "ip6") {
		return IPv6
	}
	return IPv4
}

// between returns what is between two texts, or "".
func between(text, before, after string) string {
	_, rest, _ := strings.Cut(text, before)
	found, _, _ := strings.Cut(rest, after)
	return found
}

// capable reports whether this process has a capability. If that cannot be read, it
// may have it.
func capable(bit int) bool {
	effective, err := effectiveCapabilities()
	return err != nil || effective&(1<<bit) != 0
}

// withoutCapability returns an error that names the missing capability alone, if that
// is why err occurred: what the tools say of it leads astray.
func withoutCapability(err error) error {
	if err == nil || capable(unix.CAP_NET_ADMIN) || !is(err, errPermission, os.ErrPermission) {
		return err
	}
	return ErrCapability
}
