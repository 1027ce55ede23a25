package test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// conntrackSockets returns duplicates of the sockets over which an agent queries connection
// tracking.
func (a *agent) conntrackSockets() []*os.File {
	tb := a.host.tb
	tb.Helper()
	pid, err := unix.PidfdOpen(a.Process.Pid, 0)
	if err != nil {
		tb.Fatal(err)
	}
	defer unix.Close(pid)
	var found []*os.File
	entries, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(a.Process.Pid), "fd"))
	if err != nil {
		tb.Fatal(err)
	}
	for _, entry := range entries {
		number, err := strconv.Atoi(entry.Name())
		if err != nil {
			tb.Fatal(err)
		}
		fd, err := unix.PidfdGetfd(pid, number, 0)
		if err != nil {
			continue // it was closed
		}
		domain, domainErr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		protocol, protocolErr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		file := os.NewFile(uintptr(fd), entry.Name())
		if errors.Join(domainErr, protocolErr) != nil || domain != unix.AF_NETLINK || protocol != unix.NETLINK_NETFILTER {
			file.Close()
			continue
		}
		tb.Cleanup(func() { file.Close() })
		found = append(found, file)
	}
	if len(found) == 0 {
		tb.Fatal("the agent has no socket for connection tracking")
	}
	return found
}

// silence makes a socket receive nothing, or everything again.
func silence(t *testing.T, socket *os.File, on bool) {
	t.Helper()
	fd := int(socket.Fd())
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	if on {
		nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestOriginalDestinationUnknown checks that no other nameserver answers a captured query
// while the kernel does not report its original destination, not from the cache either.
func TestOriginalDestinationUnknown(t *testing.T) { // F14
	t.Parallel()
	netns.Need(t, "iptables", "dig")
	h := newHost(t)
	a := h.start()
	h.redirect()
	const name = "www.example.org"
	h.digs("192.0.2.53", "@"+named, name)
	h.digs("192.0.2.54", "@"+other, name)
	sockets := a.conntrackSockets()
	for _, s := range sockets {
		silence(t, s, true)
	}
	for _, server := range []string{named, other} {
		h.digs("SERVFAIL", "@"+server, name)
		h.digs("10.1.0.1", "@"+server, "web.shop.svc.cluster.local")
	}
	if got := h.Exec("dig", "+tries=1", "@"+other, name); !strings.Contains(got, "which nameserver the query was sent to") {
		t.Errorf("no Extended DNS Error:\n%s", got)
	}
	if n := h.metric("nametap_dns_original_destination_errors_total"); n == 0 {
		t.Error("no error is counted")
	}
	for _, s := range sockets {
		silence(t, s, false)
	}
	h.digs("192.0.2.53", "@"+named, name)
	h.digs("192.0.2.54", "@"+other, name)
}
