package resolved

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"
)

// systemd-resolved accepts settings of an interface from root, or from users that polkit allows. Many servers have
// no polkit, and the agent is not root. So it has a helper, and a socket to which only the agent's user can
// connect. For each connection, systemd starts the helper as root. The helper reads one registration, makes it,
// writes the result and ends.

const (
	// defaultHelper is the socket of nametap-resolved.socket.
	defaultHelper = "/run/nametap-resolved.sock"
	// helperTimeout is how long the helper may take for a registration.
	helperTimeout = 10 * time.Second
	// maxRegistration bounds the length of a registration in bytes. It is enough for maxDomains names of the
	// maximal length.
	maxRegistration = 128 << 10
)

// A result is the answer of the helper.
type result struct {
	Error string `json:"error,omitempty"`
}

// askHelper sends a registration to the helper whose socket is at path, and returns the helper's result.
func askHelper(ctx context.Context, path string, r Registration) error {
	ctx, cancel := context.WithTimeout(ctx, helperTimeout)
	defer cancel()
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
	var answer result
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return fmt.Errorf("the helper did not answer, see `journalctl -u 'nametap-resolved@*'`: %w", err)
	}
	if answer.Error != "" {
		return errors.New(answer.Error)
	}
	return nil
}

// Help is the helper: it reads a registration from r, makes the registration, and writes the result to w. It returns
// the error of the registration and the error of writing, if there are any.
func Help(ctx context.Context, r io.Reader, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, helperTimeout)
	defer cancel()
	err := help(ctx, r)
	var answer result
	if err != nil {
		answer.Error = err.Error()
	}
	return errors.Join(err, json.NewEncoder(w).Encode(answer))
}

func help(ctx context.Context, r io.Reader) error {
	wanted, err := readRegistration(r)
	if err != nil {
		return err
	}
	if err := ownAddress(wanted.Server.Addr()); err != nil {
		return err
	}
	// The helper changes only nametap's interface.
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

// readRegistration reads and checks a registration: the agent that has written it may be compromised.
func readRegistration(r io.Reader) (Registration, error) {
	var wanted Registration
	if err := json.NewDecoder(io.LimitReader(r, maxRegistration)).Decode(&wanted); err != nil {
		return Registration{}, fmt.Errorf("reading a registration: %.200s", err.Error()) // bounded, because the error quotes the input
	}
	server := wanted.Server
	if server.Port() == 0 || server.Addr().Zone() != "" || len(wanted.Domains) > maxDomains {
		return Registration{}, fmt.Errorf("want a server and at most %d domains, have %.100q and %d", maxDomains, server, len(wanted.Domains))
	}
	for _, name := range wanted.Domains {
		const longest = 253
		if len(name) > longest || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return Registration{}, fmt.Errorf("%.100q is no domain", name)
		}
	}
	return wanted, nil
}

// ownAddress returns an error unless address is an address of this host, on which the agent may listen.
func ownAddress(address netip.Addr) error {
	if address.IsLoopback() {
		return nil
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("reading the addresses of this host: %w", err)
	}
	for _, a := range own {
		if network, ok := a.(*net.IPNet); ok && network.IP.Equal(address.AsSlice()) {
			return nil
		}
	}
	return fmt.Errorf("%s is no address of this host", address)
}
