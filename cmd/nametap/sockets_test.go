package main

import (
	"context"
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// shared opens a UDP socket with SO_REUSEADDR, as systemd does.
func shared(t *testing.T, address string) (*net.UDPConn, error) {
	t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}), err)
	}}
	conn, err := config.ListenPacket(context.Background(), "udp", address)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn.(*net.UDPConn), nil
}

// TestSocketsAreExclusive checks that no other program can bind to the address of a UDP socket
// of systemd, where it would receive the captured queries. V1.
func TestSocketsAreExclusive(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "0.0.0.0:0"} {
		systemds, err := shared(t, address)
		if err != nil {
			t.Fatal(err)
		}
		file, err := systemds.File()
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		_, port, _ := net.SplitHostPort(systemds.LocalAddr().String())
		if err := exclusive([]*os.File{file}); err != nil {
			t.Fatal(err)
		}
		if _, err := shared(t, "127.0.0.1:"+port); !errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: a second socket: %v, want %v", address, err, unix.EADDRINUSE)
		}
	}
}
