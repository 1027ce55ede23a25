package test

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// switchIPv6 switches IPv6 on or off, as users do by sysctl.
func (v *vm) switchIPv6(on bool) {
	v.tb.Helper()
	value := "1"
	if on {
		value = "0"
	}
	v.Exec("sh", "-c", "echo "+value+" >/proc/sys/net/ipv6/conf/all/disable_ipv6")
	if on {
		v.Exec("ip", "address", "add", self6+"/64", "dev", "eth0", "nodad")
	}
}

// systemdSockets opens the sockets of nametap.socket, which has FreeBind=yes. They do not block,
// because the services have NonBlocking=yes. streams are the addresses of further TCP sockets.
func (v *vm) systemdSockets(streams ...string) []*os.File {
	v.tb.Helper()
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) (err error) {
		controlErr := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) })
		if controlErr != nil {
			return controlErr
		}
		return err
	}}
	var files []*os.File
	v.Run(func() {
		for _, address := range []string{dnsAddr, "[::1]:15053"} {
			udp, err := config.ListenPacket(context.Background(), "udp", address)
			if err != nil {
				v.tb.Fatal(err)
			}
			defer udp.Close()
			files = append(files, v.file(udp))
		}
		for _, address := range append([]string{dnsAddr, "[::1]:15053"}, streams...) {
			tcp, err := config.Listen(context.Background(), "tcp", address)
			if err != nil {
				v.tb.Fatal(err)
			}
			defer tcp.Close()
			files = append(files, v.file(tcp))
		}
	})
	return files
}

// file returns a duplicate of a socket as a file. Unlike the file of its method File, that does not set
// the socket to block.
func (v *vm) file(socket any) *os.File {
	v.tb.Helper()
	conn, err := socket.(syscall.Conn).SyscallConn()
	if err != nil {
		v.tb.Fatal(err)
	}
	var fd int
	controlErr := conn.Control(func(original uintptr) {
		fd, err = unix.FcntlInt(original, unix.F_DUPFD_CLOEXEC, 3)
	})
	if err = errors.Join(controlErr, err); err != nil {
		v.tb.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "socket")
	v.tb.Cleanup(func() { file.Close() })
	return file
}

// TestIPv6SwitchedOff checks that the agent is ready, captures IPv4 and satisfies systemd's
// watchdog while IPv6 is switched off. IPv6 is captured as soon as it is available, and its
// rules are removed when it is switched off again. The test covers the sockets that systemd
// holds, which stay open, and those that the agent opens itself.
func TestIPv6SwitchedOff(t *testing.T) { // K4, K9, R3
	t.Parallel()
	for name, systemd := range map[string]bool{"systemd": true, "own sockets": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			next := v.notifications()
			v.switchIPv6(false)
			if systemd {
				v.sockets = v.systemdSockets()
			}
			a := v.launch("--capture")
			wellFor := func(times int) {
				t.Helper()
				for range times {
					if got := next(); got != "WATCHDOG=1" {
						t.Errorf("a notification is %q", got)
					}
				}
			}
			if got := next(); got != "READY=1" || !v.captured() {
				t.Errorf("the first notification is %q", got)
			}
			if a.log.Count("degraded") > 0 {
				t.Error("a host without IPv6 is called degraded")
			}
			v.asked(named, meshIP)
			// The agent cannot open its own sockets; those of systemd are open and silent.
			if status := v.nametap("status", "--status-addr", statusAddr); strings.Contains(status.stdout, ": udp [::1]:15053") != systemd ||
				strings.Contains(status.stdout, ": udp 127") {
				t.Errorf("%+v", status)
			}
			wellFor(5)
			for range 2 {
				v.switchIPv6(true)
				wait.Until(t, "IPv6 is captured", func() bool { return v.digSoon("@"+named6, mesh) == meshIP })
				v.asked(named, meshIP)
				v.switchIPv6(false)
				wait.Until(t, "IPv6 is not captured", func() bool { return !v.leased(family.IPv6) })
				v.asked(named, meshIP)
				wellFor(3)
			}
			a.end(terminate)
			if v.captured() {
				t.Errorf("rules are left:\n%s", v.Rules())
			}
		})
	}
}

// TestIPv4Absent checks that IPv4 is not captured while the host has no 127.0.0.1.
func TestIPv4Absent(t *testing.T) { // K17
	t.Parallel()
	v := newVM(t, "nft")
	a := v.capture()
	v.asked(named, meshIP)
	v.Exec("ip", "address", "del", "127.0.0.1/8", "dev", "lo")
	v.becomes(named, namedIP)
	v.asked(named6, meshIP)
	v.Exec("ip", "address", "add", "127.0.0.1/8", "dev", "lo")
	wait.Until(t, "IPv4 is captured", func() bool { return v.digSoon("@"+named, mesh) == meshIP })
	v.asked(named6, meshIP)
	a.end(terminate)
	if v.captured() {
		t.Errorf("rules are left:\n%s", v.Rules())
	}
}
