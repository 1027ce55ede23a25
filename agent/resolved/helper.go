package resolved

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/nametap/nametap/internal/listen"
)

// systemd-resolved accepts settings of an interface from root, or from users that polkit allows. Many servers have
// no polkit, and the agent is not root. So it has a helper, and a socket to which only the agent's user can
// connect. For each connection, systemd starts the helper as root. The helper reads one registration, makes it,
// writes "ok" or an error, and ends.

const (
	// defaultHelper is the socket of nametap-resolved.socket.
	defaultHelper = "/run/nametap-resolved.sock"
	// maxRegistration bounds the length of a registration in bytes. It is enough for the 256 domains that
	// systemd-resolved accepts for one interface.
	maxRegistration = 128 << 10
	// done is the answer of a helper that has made the registration.
	done = "ok\n"
)

// askHelper sends a registration to the helper whose socket is at path, and returns the helper's error.
func askHelper(ctx context.Context, path string, r Registration) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return fmt.Errorf("connecting to nametap-resolved.socket: %w", err)
	}
	defer func() { _ = conn.Close() }()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return fmt.Errorf("writing to the helper: %w", err)
	}
	answer, err := io.ReadAll(conn)
	switch {
	case err == nil && string(answer) == done:
		return nil
	case err != nil || len(answer) == 0:
		return errors.Join(errors.New("the helper did not answer, see `journalctl -u 'nametap-resolved@*'`"), err)
	}
	return errors.New(strings.TrimSpace(string(answer)))
}

// Help is the helper: it reads a registration from r, makes the registration, and writes the answer to w. It returns
// the error of the registration and the error of writing, if there are any.
func Help(ctx context.Context, r io.Reader, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	wanted, err := readRegistration(r)
	if err == nil {
		err = help(ctx, wanted)
	}
	answer := done
	if err != nil {
		answer = err.Error() + "\n"
	}
	_, writeErr := io.WriteString(w, answer)
	return errors.Join(err, writeErr)
}

// help makes a registration if it is for nametap's interface.
func help(ctx context.Context, wanted Registration) error {
	if index, err := findLink(); err != nil || index == 0 || index != wanted.Link {
		return errors.Join(fmt.Errorf("interface %d is not %s", wanted.Link, LinkName), err)
	}
	b, err := dialBus(ctx)
	if err != nil {
		return err
	}
	defer b.close()
	return b.register(ctx, wanted)
}

// readRegistration reads a registration and checks its server: the agent that has written it may be compromised.
// systemd-resolved checks the domains.
func readRegistration(r io.Reader) (wanted Registration, err error) {
	if err := json.NewDecoder(io.LimitReader(r, maxRegistration)).Decode(&wanted); err != nil {
		return wanted, fmt.Errorf("reading a registration: %.200s", err.Error()) // bounded, because the error quotes the input
	}
	addr := wanted.Server.Addr()
	if wanted.Server.Port() == 0 || addr.Zone() != "" {
		return wanted, fmt.Errorf("want the address and the port of a listener, have %.100q", wanted.Server)
	}
	if own, err := listen.OnInterface(addr); err != nil || !own && !addr.IsLoopback() {
		return wanted, errors.Join(err, fmt.Errorf("%s is no address of this host", addr))
	}
	return wanted, nil
}
