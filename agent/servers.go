package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
)

// CapturedServers returns the nameservers that clients query according to the resolv.conf at path.
func CapturedServers(path string) ([]netip.Addr, error) {
	file, err := readServers(path)
	if err != nil {
		return nil, err
	}
	return addrs(file), nil
}

// OnlyNameserverOf returns path if all nameservers in the resolv.conf at path are listeners of the agent: then
// programs that use this file send their queries to the agent, even without rules. Otherwise it returns "". An empty
// path stands for the default path of resolv.conf.
func OnlyNameserverOf(path string, listeners []netip.AddrPort) string {
	path = cmp.Or(path, resolvconf.DefaultPath)
	file, err := readServers(path)
	if err != nil {
		return ""
	}
	if others, _ := resolvconf.WithoutSelf(file.Servers, listeners, nil); len(others) > 0 {
		return ""
	}
	return path
}

// readServers reads the resolv.conf at path. It returns an error if the file names no nameserver.
func readServers(path string) (*resolvconf.Config, error) {
	file, err := clientsFile(path).Read()
	if err == nil && len(file.Servers) == 0 {
		err = errors.New("the file names none")
	}
	if err != nil {
		return nil, fmt.Errorf("capturing queries for the nameservers of %s: %w", path, err)
	}
	return file, nil
}

// clientsFile returns the resolv.conf at path as clients read it: if the file names a stub resolver, clients query
// the stub resolver and not the nameservers behind it.
func clientsFile(path string) resolvconf.Files {
	return resolvconf.Files{Path: path, Uplink: os.DevNull}
}

// addrs returns the addresses of nameservers.
func addrs(file *resolvconf.Config) []netip.Addr {
	var found []netip.Addr
	for _, server := range file.Servers {
		found = append(found, server.Addr())
	}
	return found
}
