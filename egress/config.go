package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/sockets"
)

// VIPs returns the ranges that automatic VIPs are from, those of Istio: a part of the reserved
// addresses (RFC 1112, section 4) and one of the addresses for benchmarks (RFC 5180).
func VIPs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("240.240.0.0/16"), netip.MustParsePrefix("2001:2::/48")}
}

// A Config configures a [Server]. [DefaultConfig] returns the defaults; Table, Resolve and Logger
// have none.
type Config struct {
	// Addr is the host:port to listen on: localhost for 127.0.0.1 and ::1, an IP address, or no host
	// for all addresses.
	Addr string
	// Sockets are listening TCP sockets on the port of Addr that another process holds. They replace
	// those that New would open. New closes the files.
	Sockets []*os.File
	// OpenOthers also opens the listeners of Addr that are not among Sockets. Default false: the other
	// process decides.
	OpenOthers bool
	// Opened is called with all listeners when one is opened after New. It may be nil.
	Opened func([]netip.AddrPort)
	// Store is called with each listener that the server opens, so that it can be kept for the next process. It
	// may be nil.
	Store func(net.Listener)
	// Table returns the current table.
	Table func() *table.Table
	// Synced is closed when there is a table. Until then Table may return nil, and connections wait for
	// up to ten seconds.
	Synced <-chan struct{}
	// Resolve returns the addresses of a name as nameservers know it, in any order. An error says why
	// there are none. With onlyCached it does not wait, and known is false if it would have to.
	Resolve func(ctx context.Context, name string, family Family, onlyCached bool) (addrs []netip.Addr, known bool, err error)
	// OwnPorts are the ports on which the agent itself listens. They are not dialled at addresses of
	// this host.
	OwnPorts []uint16
	// Sources are the addresses that connections to hosts come from, at most one of each family. If only
	// one family has an address here, the other family is not used. Without any, the kernel chooses.
	Sources []netip.Addr
	// Mark is the mark (SO_MARK) of the packets to hosts; 0 for none. It needs CAP_NET_ADMIN.
	Mark uint32
	// Proxy is an HTTP proxy that connects to hosts in place of this one, by CONNECT (RFC 9110,
	// section 9.3.6): its host:port. It gets the names of hosts, not their addresses.
	Proxy string
	// Memory is the memory in bytes that the process and its sockets may use; 0 if that is not known. It limits the
	// connections that are open at a time, and so does the number of descriptors that the process may have.
	Memory int64
	// IdleTimeout is how long a connection may send nothing in both directions before it is closed. One that has
	// ended in one direction has a twelfth of that time.
	IdleTimeout time.Duration
	// Drain is how long open connections go on at the end.
	Drain time.Duration
	// Logger is the log.
	Logger *slog.Logger
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

// DefaultConfig returns a Config with all defaults.
func DefaultConfig() Config {
	return Config{
		Addr: "localhost:15054", IdleTimeout: time.Hour,
	}
}

// Validate returns an error for the first field that is not valid, with its value and what was
// expected.
func (c *Config) Validate() error {
	if _, _, err := c.listenAddrs(); err != nil {
		return err
	}
	seen := map[Family]bool{}
	for _, a := range c.Sources {
		if !a.IsValid() || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || seen[familyOf(a)] {
			return fmt.Errorf("egress source %s: want at most one address of this host of each family", a)
		}
		seen[familyOf(a)] = true
	}
	if c.IdleTimeout <= 0 || c.Drain < 0 {
		return fmt.Errorf("egress idle timeout %v and drain %v: want more than 0, and 0 or more", c.IdleTimeout, c.Drain)
	}
	if c.Proxy == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(c.Proxy)
	if n, portErr := strconv.ParseUint(port, 10, 16); err != nil || portErr != nil || n == 0 || host == "" || (&url.URL{Host: c.Proxy}).Hostname() != host {
		return fmt.Errorf("egress proxy %q: want host:port", c.Proxy)
	}
	return nil
}

// listenAddrs returns the addresses and the port of Addr.
func (c *Config) listenAddrs() (hosts []netip.Addr, port uint16, err error) {
	return sockets.SplitAddr("egress address", c.Addr)
}

// A Family is an IP version, 4 or 6.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// familyOf returns the family of an address.
func familyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}
