package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
)

// followServers follows the nameservers of resolv.conf until ctx ends.
func (c *capture) followServers(ctx context.Context) {
	watcher := resolvconf.Watcher{
		Files: clientsFile(c.current().ResolvConf), Current: c.file,
		Changed: func(file *resolvconf.Config) {
			c.follow(func(in *inputs) { in.servers = addrs(file) })
		},
		Failed: func(err error) {
			if in := c.current(); in.Servers == ResolvConfServers && len(in.servers) > 0 { // without servers that was logged
				c.log.Warn("resolv.conf has no usable nameservers; capture keeps the previous ones", "error", err)
			}
		},
	}
	_ = watcher.Run(ctx) // it returns nil
}

// CapturedServers returns the nameservers that clients query according to a resolv.conf.
func CapturedServers(path string) ([]netip.Addr, error) {
	file, err := readServers(path)
	if err != nil {
		return nil, err
	}
	return addrs(file), nil
}

// readServers reads a resolv.conf that has nameservers.
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

// clientsFile returns a resolv.conf as clients read it: if it names a stub resolver, they query
// that and not the nameservers behind it.
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
