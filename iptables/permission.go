package iptables

import (
	"fmt"
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
	missing := ""
	switch {
	case !capable(unix.CAP_NET_ADMIN):
		missing = "CAP_NET_ADMIN"
	case !capable(unix.CAP_NET_RAW) && strings.Contains(message, "legacy"):
		missing = "CAP_NET_RAW"
	}
	if missing != "" {
		return missing + " is missing: in a pod, add it to securityContext.capabilities.add, in a systemd unit to AmbientCapabilities"
	}
	if found := confinement(); len(found) > 0 {
		return "this process has the capabilities, but is confined by " + strings.Join(found, ", ")
	}
	return "it needs CAP_NET_ADMIN in the user namespace that owns the network namespace; iptables-legacy also needs CAP_NET_RAW there, and CAP_DAC_READ_SEARCH if it does not run as root"
}

// confinement lists what may make the kernel refuse calls of this process although it has capabilities.
func confinement() []string {
	var found []string
	if status, err := os.ReadFile("/proc/self/status"); err == nil && strings.Contains(string(status), "\nSeccomp:\t2\n") {
		found = append(found, "a seccomp filter (in a pod, securityContext.seccompProfile)")
	}
	if label, err := os.ReadFile("/proc/self/attr/current"); err == nil {
		if name := strings.Trim(string(label), "\x00\n"); name != "" && !strings.HasPrefix(name, "unconfined") {
			found = append(found, fmt.Sprintf("the profile %q of AppArmor or SELinux", name))
		}
	}
	if ids, err := os.ReadFile("/proc/self/uid_map"); err == nil && strings.Join(strings.Fields(string(ids)), " ") != "0 0 4294967295" {
		found = append(found, "a user namespace (in a pod, hostUsers: false), which has to own the network namespace")
	}
	return found
}
