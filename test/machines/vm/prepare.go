package vm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/test/machines/cgroup"
)

// Main runs the tests of a package that boots machines. Without what they need it fails,
// and prints what is missing and how to get it. The caller passes the result to os.Exit.
func Main(m *testing.M) int {
	if err := check(); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		return 1
	}
	_ = removeCgroups(cgroup.Ended) // another test may be removing them
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-interrupted
		_ = removeCgroups(cgroup.Own) // a later test removes what is left
		os.Exit(1)
	}()
	return m.Run()
}

// check returns an error that names everything that is missing for a machine.
func check() error {
	packages := map[string]string{
		"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container",
		"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "conntrack": "conntrack", "make": "make", "go": "",
	}
	var missing []error
	if os.Geteuid() != 0 {
		missing = append(missing, errors.New("needs root; run the target as root"))
	}
	var install []string
	for command, name := range packages {
		if _, err := exec.LookPath(command); err != nil {
			missing = append(missing, fmt.Errorf("needs a command: %w", err))
			install = append(install, name)
		}
	}
	if len(install) > 0 {
		missing = append(missing, fmt.Errorf("on Debian, run: apt-get install %s", strings.Join(install, " ")))
	}
	if _, err := unified(); err != nil {
		missing = append(missing, err)
	}
	return errors.Join(missing...)
}
