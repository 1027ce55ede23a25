package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// alone returns an error if a program of another user has bound a UDP socket to an address of
// sockets of systemd, which are those with these inodes. It may have done so before systemd
// did, and receives their packets if it is bound to an interface.
func alone(inodes map[string]bool) error {
	for _, path := range []string{"/proc/net/udp", "/proc/net/udp6"} {
		table, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // the kernel lacks the family
			continue
		case err != nil:
			return err
		}
		if user, found := squatter(string(table), inodes); found {
			return fmt.Errorf("a program of the user %s has a UDP socket at the address of nametap.socket, and may receive its queries; find it with `ss -lunp`", user)
		}
	}
	return nil
}

// squatter returns the number of a user that is not root, and has a socket with the address of one
// of the sockets with these inodes. The table is that of proc_net(5).
func squatter(table string, inodes map[string]bool) (user string, found bool) {
	const address, uid, inode, fields = 1, 7, 9, 10
	own := map[string]bool{} // addresses, without the host if that is any
	var others [][]string
	for line := range strings.Lines(table) {
		row := strings.Fields(line)
		switch {
		case len(row) < fields:
		case inodes[row[inode]]:
			own[strings.TrimLeft(row[address], "0")] = true
		case row[uid] != "0":
			others = append(others, row)
		}
	}
	for _, row := range others {
		_, port, _ := strings.Cut(row[address], ":")
		if own[strings.TrimLeft(row[address], "0")] || own[":"+port] {
			return row[uid], true
		}
	}
	return "", false
}
