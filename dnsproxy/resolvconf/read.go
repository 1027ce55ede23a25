package resolvconf

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"syscall"
)

// The files of a zero [Files].
const (
	DefaultPath   = "/etc/resolv.conf"
	defaultUplink = "/run/systemd/resolve/resolv.conf"
)

// maxSize bounds the size of a file in bytes. Kubernetes allows a search
// list of 2,048 characters, so this is ample.
const maxSize = 64 << 10

// Files names the files to read. The zero value means the usual files.
type Files struct {
	// Path is the resolv.conf; empty means [DefaultPath].
	Path string
	// Uplink is the resolv.conf that systemd-resolved writes for programs that do not
	// use its stub; empty means /run/systemd/resolve/resolv.conf.
	Uplink string
}

// Read reads the configuration. It fails only if the file cannot be read, is not a
// regular file, or is longer than 64 KiB; a file without a nameserver is not an error.
//
// If the file names systemd-resolved's stub, 127.0.0.53 or 127.0.0.54, the servers of f.Uplink
// take its place in the list. The stub would forward queries to these servers, and its queries may be captured
// and come back to the agent. The search list and the
// options come from the file f.Path, except for trust-ad. This option means that the path to the servers is trusted, so
// for the servers of f.Uplink the option in f.Uplink counts. If f.Uplink has no server, the stub stays in the list, and
// [Config.Ignored] has a sentence about it.
func (f Files) Read() (*Config, error) {
	if f.Path == "" {
		f.Path = DefaultPath
	}
	if f.Uplink == "" {
		f.Uplink = defaultUplink
	}
	text, err := readFile(f.Path)
	if err != nil {
		return nil, fmt.Errorf("reading nameservers: %w", err)
	}
	conf := Parse(text)
	first := slices.IndexFunc(conf.Servers, IsStub)
	if first < 0 {
		return conf, nil
	}
	uplink := new(Config)
	if text, err = readFile(f.Uplink); err == nil {
		uplink = Parse(text)
		if uplink.Servers = slices.DeleteFunc(uplink.Servers, IsStub); len(uplink.Servers) == 0 {
			err = fmt.Errorf("%q names no nameserver", f.Uplink)
		}
	}
	if err != nil {
		conf.Ignored = append(conf.Ignored,
			fmt.Sprintf("systemd-resolved's stub %s is not replaced by its nameservers: %v",
				conf.Servers[first].Addr(), err))
		return conf, nil
	}
	var all []netip.AddrPort
	for _, s := range slices.Concat(conf.Servers[:first], uplink.Servers, conf.Servers[first:]) {
		if !IsStub(s) && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	conf.Servers, conf.TrustAD, conf.Uplink = all, uplink.TrustAD, f.Uplink
	return conf, nil
}

// IsStub reports whether server is systemd-resolved's stub (systemd-resolved(8)):
// 127.0.0.53, or 127.0.0.54, where systemd-resolved only forwards.
func IsStub(server netip.AddrPort) bool {
	return server == netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 53}), dnsPort) ||
		server == netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 54}), dnsPort)
}

// readFile reads a regular file of at most maxSize bytes.
func readFile(path string) ([]byte, error) {
	// Without O_NONBLOCK, opening a FIFO would wait for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is not a regular file", path)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxSize+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxSize {
		return nil, fmt.Errorf("%q is longer than %d bytes", path, maxSize)
	}
	return text, nil
}

// WithoutSelf removes the servers that are the agent itself. It returns the other servers in their order, and for
// each server that it removes, a sentence with the reason. listeners are the addresses on which the agent listens,
// and local are the addresses of this host.
//
// A server is the agent if a query to it arrives at one of the listeners. The listener must have the port of the
// server. It must also have the server's address, or the wildcard address of its family if the server's address is
// loopback or is in local. A link-local address in local that has no zone stands for this address on every
// interface.
//
// If no server is left, the caller must answer queries with an error: it would send them to itself if it used one of
// the removed servers. WithoutSelf does not find a forwarder on another host that forwards to the agent.
func WithoutSelf(servers, listeners []netip.AddrPort, local []netip.Addr) (others []netip.AddrPort, self []string) {
	for _, server := range servers {
		if reason := selfReason(server, listeners, local); reason != "" {
			self = append(self, fmt.Sprintf("nameserver %s is this agent: %s", server, reason))
			continue
		}
		others = append(others, server)
	}
	return others, self
}

// selfReason returns the reason why server is the agent itself; empty if it is not.
func selfReason(server netip.AddrPort, listeners []netip.AddrPort, local []netip.Addr) string {
	addr := hostOf(server.Addr().Unmap())
	for _, l := range listeners {
		listen := l.Addr().Unmap()
		switch {
		case l.Port() != server.Port() || listen.Is4() != addr.Is4():
		case sameAddr(listen, addr):
			return fmt.Sprintf("it listens on %s", l)
		case !listen.IsUnspecified():
		case addr.IsLoopback():
			return fmt.Sprintf("it listens on %s, which includes loopback", l)
		default:
			for _, a := range local {
				if sameAddr(a.Unmap(), addr) {
					return fmt.Sprintf("it listens on %s, and %s is an address of this host", l, a)
				}
			}
		}
	}
	return ""
}

// sameAddr reports whether the addresses are equal. An address without a zone equals one with any zone.
func sameAddr(a, b netip.Addr) bool {
	return a == b || (a.Zone() == "" || b.Zone() == "") && a.WithZone("") == b.WithZone("")
}
