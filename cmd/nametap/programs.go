package main

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-systemd/v22/activation"

	"github.com/nametap/nametap/internal/listen"
)

// A takenPort is a port of the agent that another program uses.
type takenPort struct {
	Address string // with the protocol
	Program string // with its process number; "" if that is not known
}

// programsAt returns the programs other than nametap that have the port of a DNS address: at that address, at
// loopback or at all addresses. Only root sees the programs of other users.
func programsAt(addr string) (found []takenPort) {
	hosts, port, err := listen.SplitAddr("address", addr)
	if err != nil {
		return nil
	}
	for _, table := range []string{"udp", "tcp", "udp6", "tcp6"} {
		bound, _ := readSockets(table) // a table that cannot be read names no program
		for _, s := range bound {
			at := s.addr.Addr()
			same := at.IsUnspecified() || at.IsLoopback() || hosts[0].IsUnspecified() || slices.Contains(hosts, at)
			if s.connected || s.addr.Port() != port || !same {
				continue
			}
			if program, own := programOf(s.inode); !own {
				found = append(found, takenPort{strings.TrimSuffix(table, "6") + " " + s.addr.String(), program})
			}
		}
	}
	return found
}

// A boundSocket is a row of a table of sockets.
type boundSocket struct {
	addr       netip.AddrPort
	connected  bool
	listens    bool // whether it is a TCP socket that listens
	uid, inode string
}

// readSockets returns the sockets of this network namespace in a table of proc_net(5), such as udp6. It returns
// none if the kernel lacks the family.
func readSockets(table string) ([]boundSocket, error) {
	text, err := os.ReadFile("/proc/net/" + table)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return parseSockets(string(text)), err
}

// parseSockets reads a table of proc_net(5).
func parseSockets(table string) (found []boundSocket) {
	const (
		local, peer, state, uid, inode, fields = 1, 2, 3, 7, 9, 10

		listen = "0A" // TCP_LISTEN
	)
	for line := range strings.Lines(table) {
		row := strings.Fields(line)
		if len(row) < fields {
			continue
		}
		if addr, ok := parseHexAddr(row[local]); ok {
			found = append(found,
				boundSocket{addr, strings.Trim(row[peer], "0:") != "", row[state] == listen, row[uid], row[inode]})
		}
	}
	return found
}

// parseHexAddr reads an address of proc_net(5): words in the byte order of the machine, in hexadecimal.
func parseHexAddr(text string) (addr netip.AddrPort, ok bool) {
	host, port, _ := strings.Cut(text, ":")
	words, err := hex.DecodeString(host)
	number, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(words)%4 != 0 {
		return addr, false
	}
	for i := 0; i < len(words); i += 4 {
		binary.BigEndian.PutUint32(words[i:], binary.NativeEndian.Uint32(words[i:]))
	}
	ip, ok := netip.AddrFromSlice(words)
	return netip.AddrPortFrom(ip.Unmap(), uint16(number)), ok
}

// programOf returns the name and the number of the process that has a socket, "" if that is not known. isOwn is true
// if nametap has the socket, or systemd, which may hold it for nametap.
func programOf(inode string) (program string, isOwn bool) {
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return "", false
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || target != "socket:["+inode+"]" {
			continue
		}
		process := strings.Split(link, "/")[2]
		name, err := os.ReadFile("/proc/" + process + "/comm")
		if err != nil {
			return "", false
		}
		program = strings.TrimSpace(string(name))
		return fmt.Sprintf("%s (process %s)", program, process), process == "1" || program == "nametap"
	}
	return "", false
}

// checkSquatters returns an error if a program of another user has a UDP socket at the address of a socket of systemd.
// inodes are the inodes of systemd's sockets. A program can open such a socket before systemd opens its own. If the
// program also binds its socket to an interface, the kernel prefers that socket, and the program receives the queries.
func checkSquatters(inodes map[string]bool) error {
	for _, table := range []string{"udp", "udp6"} {
		sockets, err := readSockets(table)
		if err != nil {
			return err
		}
		if user, found := squatter(sockets, inodes); found {
			return fmt.Errorf("a program of the user %s has a UDP socket at the address of nametap.socket, and may receive "+
				"its queries; find it with `ss -lunp`", user)
		}
	}
	return nil
}

// squatter returns the uid of a user other than root who has a socket at the address of a socket with one of these
// inodes.
func squatter(sockets []boundSocket, inodes map[string]bool) (user string, found bool) {
	own := map[netip.AddrPort]bool{}
	anyHost := map[uint16]bool{} // by port: whether a socket in inodes has the port on all addresses
	for _, s := range sockets {
		if inodes[s.inode] {
			own[s.addr] = true
			anyHost[s.addr.Port()] = anyHost[s.addr.Port()] || s.addr.Addr().IsUnspecified()
		}
	}
	for _, s := range sockets {
		if s.uid != "0" && !inodes[s.inode] && (own[s.addr] || anyHost[s.addr.Port()]) {
			return s.uid, true
		}
	}
	return "", false
}

// systemdSockets returns the sockets that systemd passes to this process; none without systemd. It returns an error if
// a program of another user may receive the packets of UDP sockets.
func systemdSockets() (*listen.Inherited, error) {
	inherited, err := listen.Inherit(activation.Files(true), true)
	if err != nil || !inherited.Unit() {
		return inherited, err
	}
	inodes, err := inherited.Inodes()
	if err != nil {
		return nil, err
	}
	return inherited, checkSquatters(inodes)
}
