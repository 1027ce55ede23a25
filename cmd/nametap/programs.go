package main

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/nametap/nametap/agent/problems"
)

// programsAt returns the programs that have the port of a DNS address, at that address or at all. Only root sees the
// programs of other users.
func programsAt(addr string) (found []problems.Taken) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil
	}
	for _, table := range []string{"udp", "tcp", "udp6", "tcp6"} {
		text, err := os.ReadFile("/proc/net/" + table)
		if err != nil {
			continue // the kernel lacks the family
		}
		for _, s := range listening(string(text)) {
			all := s.addr.Addr().IsUnspecified()
			if s.addr.Port() != uint16(number) || !all && host != "" && !s.addr.Addr().IsLoopback() && s.addr.Addr().String() != host {
				continue
			}
			if program, own := programOf(s.inode); !own {
				found = append(found, problems.Taken{Address: strings.TrimSuffix(table, "6") + " " + s.addr.String(), Program: program})
			}
		}
	}
	return found
}

// A boundSocket is a socket that receives what is sent to an address.
type boundSocket struct {
	addr  netip.AddrPort
	inode string
}

// listening returns the sockets of a table as in proc_net(5) that are not connected.
func listening(table string) (found []boundSocket) {
	const local, peer, inode, fields = 1, 2, 9, 10
	for line := range strings.Lines(table) {
		row := strings.Fields(line)
		if len(row) < fields || strings.Trim(row[peer], "0:") != "" {
			continue
		}
		if addr, ok := parseHexAddr(row[local]); ok {
			found = append(found, boundSocket{addr, row[inode]})
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

// programOf returns the name and the number of the process that has a socket, "" if that is not known. The socket is
// own if nametap has it, or systemd for nametap.
func programOf(inode string) (program string, own bool) {
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
