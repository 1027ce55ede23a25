package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
)

// addrSetting names [Config.Addr] in errors.
const addrSetting = "egress-addr"

// VIPs returns the ranges of automatic VIPs: a part of the reserved IPv4 addresses (RFC 1112, section 4), of which istiod
// uses 240.240.0.0/16, and a part of the IPv6 addresses for benchmarks (RFC 5180).
func VIPs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("240.128.0.0/9"), netip.MustParsePrefix("2001:2::/48")}
}

// A Config configures a [Server]. [DefaultConfig] returns the defaults; Table, Resolve and Logger
// have none.
type Config struct {
	// Addr is the host:port to listen on: localhost for 127.0.0.1 and ::1, an IP address, or no host
	// for all addresses.
	Addr string
	// Inherited has sockets that another process holds; nil for none. New uses those on the port of Addr.
	Inherited *listen.Inherited
	// Opened is called with the addresses of all open listeners when a listener is opened after New. It may be
	// nil.
	Opened func([]netip.AddrPort)
	// Table returns the current table.
	Table func() *table.Table
	// Synced is closed when there is a table. Until then Table may return nil, and a connection waits for up to
	// ten seconds.
	Synced <-chan struct{}
	// Guard has the policy about the names that clients may reach by VIPs of the guard; nil for none.
	Guard *guard.Guard
	// Resolve returns the addresses that nameservers have for a name, in any order. err says why there are none.
	// If onlyCached is true, Resolve does not wait: known is false if it would have to wait.
	Resolve func(ctx context.Context, name string, f family.Family, onlyCached bool) (addrs []netip.Addr, known bool, err error)
	// OwnPorts are the ports on which the agent itself listens. They are not dialled at addresses of
	// this host.
	OwnPorts []uint16
	// Sources are the addresses of this host from which connections to hosts are made, at most one of each family.
	// If all are of one family, the other family is not used. If there are none, the kernel chooses the address.
	Sources []netip.Addr
	// Mark is the mark (SO_MARK) of the packets to hosts; 0 for none. It needs CAP_NET_ADMIN.
	Mark uint32
	// Proxy is the host:port of an HTTP proxy through which the server connects to hosts, by CONNECT (RFC 9110,
	// section 9.3.6). The proxy resolves their names.
	Proxy string
	// Memory is how many bytes of memory the process and its sockets may use; 0 if that is not known. It limits
	// the number of open connections, and so does the number of descriptors that the process may have.
	Memory int64
	// IdleTimeout is how long a connection may carry no data in either direction before it is closed. If the data
	// has ended in one direction, a twelfth of IdleTimeout is the limit.
	IdleTimeout time.Duration
	// Drain is how long open connections may go on after the server was told to end.
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
	if _, _, err := listen.SplitAddr(addrSetting, c.Addr); err != nil {
		return err
	}
	seen := map[family.Family]bool{}
	for _, a := range c.Sources {
		if !a.IsValid() || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || seen[family.Of(a)] {
			return fmt.Errorf("egress source %s: want an address of this host, at most one for each family", a)
		}
		seen[family.Of(a)] = true
	}
	if c.IdleTimeout <= 0 || c.Drain < 0 {
		return fmt.Errorf("egress idle timeout %v and drain %v: want an idle timeout above 0, and a drain of 0 or more", c.IdleTimeout, c.Drain)
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
