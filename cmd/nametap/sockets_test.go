package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/agent"
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

// TestSquatter looks for sockets of other users at the addresses of systemd's. V1.
func TestSquatter(t *testing.T) {
	const heading = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"
	row := func(address, uid, inode string) string {
		return " 1: " + address + " 00000000:0000 07 00000000:00000000 00:00000000 00000000 " + uid + " 0 " + inode + " 2 0000000000000000 0\n"
	}
	for name, test := range map[string]struct{ table, want string }{
		"alone":               {row("0100007F:3ACD", "0", "7"), ""},
		"same address":        {row("0100007F:3ACD", "0", "7") + row("0100007F:3ACD", "1000", "8"), "1000"},
		"another address":     {row("0100007F:3ACD", "0", "7") + row("0200007F:3ACD", "1000", "8"), ""},
		"another port":        {row("00000000:3ACD", "0", "7") + row("0100007F:3ACE", "1000", "8"), ""},
		"below a wildcard":    {row("0100007F:3ACD", "1000", "8") + row("00000000:3ACD", "0", "7"), "1000"},
		"of root":             {row("0100007F:3ACD", "0", "7") + row("0100007F:3ACD", "0", "8"), ""},
		"without the sockets": {row("0100007F:3ACD", "1000", "8") + "\n1:\n", ""},
	} {
		if got, _ := squatter(parseSockets(heading+test.table), map[string]bool{"7": true}); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestSocketOfAnotherPort checks that the log names both settings if systemd holds a socket for connections to VIPs, as in
// a drop-in of nametap.socket, with another port than --egress-addr. E13, V1.
func TestSocketOfAnotherPort(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cfg := agent.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	shareSockets(&cfg, "localhost:1", []*os.File{file})
	for _, want := range []string{"ListenStream=" + listener.Addr().String(), "egress-addr=localhost:1 ", "different ports"} {
		if !strings.Contains(strings.TrimSpace(log.String())+" ", want) {
			t.Errorf("want %q in %s", want, &log)
		}
	}
}
