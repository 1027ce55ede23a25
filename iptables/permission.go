package iptables

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// capable reports whether this process has a capability. If that cannot be read, it returns true.
func capable(bit int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of capabilities 0 to 31, and of capabilities 32 to 63
	err := unix.Capget(&header, &sets[0])
	return err != nil || sets[bit/32].Effective&(1<<(bit%32)) != 0
}

// Permitted returns [ErrCapability] if this process lacks CAP_NET_ADMIN. Without this
// capability, some tools read the rules and then fail to change them.
func Permitted() error {
	if capable(unix.CAP_NET_ADMIN) {
		return nil
	}
	return ErrCapability
}

// withoutCapability returns err, or [ErrCapability] instead if a missing CAP_NET_ADMIN is the reason for err.
// The message of the tools is misleading in that case.
func withoutCapability(err error) error {
	if err == nil || capable(unix.CAP_NET_ADMIN) || !isAny(err, errRefused, os.ErrPermission) {
		return err
	}
	return ErrCapability
}

// refusal says why the kernel may have refused a tool that printed message: a capability is missing, or something
// else confines this process and its tools.
func refusal(message string) string {
	switch {
	case !capable(unix.CAP_NET_ADMIN):
		return ErrCapability.Error()
	case !capable(unix.CAP_NET_RAW) && strings.Contains(message, "legacy"):
		return "CAP_NET_RAW is missing: in a pod, add it to securityContext.capabilities.add, in a systemd unit to AmbientCapabilities"
	}
	return "this process has the capabilities, so something else confines it: a seccomp filter, a profile of AppArmor or SELinux, " +
		"or a user namespace that does not own the network namespace (in a pod, hostUsers: false); iptables-legacy also needs CAP_DAC_READ_SEARCH if it does not run as root"
}
