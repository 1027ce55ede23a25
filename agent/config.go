package agent

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/dnstap"
	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/iptables"
	"github.com/nametap/nametap/nds"
)

// A Config configures an [Agent].
type Config struct {
	// DNS configures the query path. Its Logger and Registerer are set by New.
	DNS dnsproxy.Config
	// XDS configures the push path. Its Logger, Registerer and Changed are set by New.
	XDS nds.Config
	// StatusAddr is the host:port of the status endpoints. An empty host means all
	// addresses, port 0 a free port.
	StatusAddr string
	// StatusSockets are listening TCP sockets on the port of StatusAddr that another process holds.
	// They replace the socket that New would open. New closes the files.
	StatusSockets []*os.File
	// SocketDirs are the directories in which the socket of the private status endpoints may be:
	// see [SocketDirs]. Without any, there are no private endpoints.
	SocketDirs []string
	// StateDirRequired makes it an error that the state directory (XDS.StateDir) cannot be
	// used. Otherwise the agent logs it and runs without a snapshot.
	StateDirRequired bool
	// Drain is how long queries are still answered, and open connections to VIPs go on, at the end. With 0
	// the agent ends at once.
	Drain time.Duration
	// Service is true if a unit of systemd starts the agent again when it ends, and holds its
	// sockets, so that queries wait meanwhile.
	Service bool
	// DrainCaptured makes an agent of a Service drain after it has removed its rules.
	DrainCaptured bool
	// ReadyTimeout is how long the agent is not ready for want of a table. After that it
	// is ready and forwards, because a pod and a VM must start without a control plane too.
	ReadyTimeout time.Duration
	// Capture configures the redirection of queries to the agent. Nil redirects none.
	Capture *CaptureConfig
	// Egress configures the connections to automatic VIPs. Its Table, Resolve, OwnPorts, Drain, Logger
	// and Registerer are set by New. Nil carries none.
	Egress *egress.Config
	// Records says where the records of queries go.
	Records RecordsConfig
	// Identity is the name of this agent in messages of dnstap.
	Identity string
	// Restarts is how often the supervisor has restarted the agent.
	Restarts int
	// Settings returns the settings that affect capture and differ from their defaults, by their names.
	// The commands for capture ask for them. It may be nil.
	Settings func() map[string][]string
	// FileSettings returns what has become of changes of the files with settings. It may be nil.
	FileSettings func() problems.Settings
	// DNSSettings returns the settings of DNS that [Agent.Configure] changes, as they are in use, if they
	// differ from their defaults, by their names. The status shows them. It may be nil.
	DNSSettings func() map[string][]string
	// Logger is the log.
	Logger *slog.Logger
	// Collectors are added to the agent's metrics.
	Collectors []prometheus.Collector
}

// DefaultConfig returns a Config with all defaults. It captures nothing. It lacks what has no
// default: a logger, and the name and the addresses of the node.
func DefaultConfig() Config {
	return Config{
		DNS: dnsproxy.DefaultConfig(), XDS: nds.DefaultConfig(),
		StatusAddr: ":15020", Drain: 5 * time.Second, ReadyTimeout: 30 * time.Second,
		Records: RecordsConfig{QueryLog: querylog.Failed},
	}
}

// Validate returns an error if a setting is wrong, whatever the state of the host. It opens no socket, and
// makes the state directory if that is required. [New] checks the same.
func (c Config) Validate() error {
	errs := []error{c.DNS.Validate(), c.XDS.Validate(), c.checkStatusAddr(), c.checkStateDir()}
	if c.Egress != nil {
		errs = append(errs, c.Egress.Validate())
	}
	return errors.Join(errs...)
}

// checkStatusAddr returns an error unless the status address is a host and a port.
func (c *Config) checkStatusAddr() error {
	_, port, err := net.SplitHostPort(c.StatusAddr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return fmt.Errorf("status address %q: want host:port (--status-addr): %w", c.StatusAddr, err)
	}
	return nil
}

// checkStateDir returns an error if the state directory is required and cannot be used.
func (c *Config) checkStateDir() error {
	if !c.StateDirRequired || c.XDS.StateDir == "" {
		return nil
	}
	if err := statedir.Check(c.XDS.StateDir); err != nil {
		return fmt.Errorf("state directory %q: want a writable directory that exists or can be created (--state-dir): %w", c.XDS.StateDir, err)
	}
	return nil
}

// prepareStateDir makes the directory of the snapshot. Without one, a restart while the
// control plane is down loses the mesh names, but all others are still answered. So it is an
// error only if the user has set the directory, which [Config.Validate] checks.
func (c *Config) prepareStateDir() {
	if c.XDS.StateDir == "" || c.StateDirRequired {
		return
	}
	err := statedir.Check(c.XDS.StateDir)
	if err == nil {
		return
	}
	c.Logger.Warn("the table cannot be saved: after a restart without the control plane there are no mesh names; set --state-dir",
		"dir", c.XDS.StateDir, "error", err)
}

// setClock gives all parts one clock, and the channels that receive when addresses change.
func (c *Config) setClock() (ticks *clock.Clock, changed [2]chan struct{}) {
	ticks = clock.ForPolling(clock.Tick)
	c.DNS.Forward.Clock, c.XDS.Clock = ticks, cmp.Or(c.XDS.Clock, ticks)
	changed = [2]chan struct{}{make(chan struct{}, 1), make(chan struct{}, 1)}
	c.DNS.Forward.AddressesChanged, c.XDS.Changed = changed[0], changed[1]
	return ticks, changed
}

// A CaptureConfig says which queries are redirected to the agent. It may change while the
// agent runs, except for ResolvConf and the port: see [Agent.SetCapture].
type CaptureConfig struct {
	// On is true if DNS is captured; Because names the setting that decides.
	On      bool
	Because string
	// Config says what is captured. With ResolvConfServers, the nameservers of ResolvConf
	// replace Config.Servers.
	Config iptables.Config
	// Servers says for which nameservers queries are captured. Default all.
	Servers CaptureServers
	// ResolvConf is the path of a resolv.conf. The agent follows its changes. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Resolved is true if the agent registers with systemd-resolved while it captures,
	// if this host runs it.
	Resolved bool
}

// CaptureServers says for which nameservers queries are captured.
type CaptureServers string

// The values of CaptureServers.
const (
	// AllServers captures queries to any server. It is the meaning of the zero value.
	AllServers CaptureServers = "all"
	// ResolvConfServers captures queries to the nameservers of resolv.conf.
	ResolvConfServers CaptureServers = "resolv-conf"
)

// MarshalText returns what UnmarshalText reads.
func (s CaptureServers) MarshalText() ([]byte, error) { return []byte(s), nil }

// UnmarshalText reads one of the values. The error says what was expected; the caller names
// the setting and its value.
func (s *CaptureServers) UnmarshalText(text []byte) error {
	switch v := CaptureServers(text); v {
	case AllServers, ResolvConfServers:
		*s = v
		return nil
	}
	return fmt.Errorf("want %s or %s", AllServers, ResolvConfServers)
}

// A RecordsConfig says where the records of queries go, besides to the clients that read them.
type RecordsConfig struct {
	// QueryLog says which queries are logged. "" logs none.
	QueryLog querylog.Mode
	// Dnstap is where queries are sent with their messages. The zero value sends none.
	Dnstap dnstap.Target
}

// portOf returns the port of a host:port, which was checked before; 0 if the kernel chooses it.
func portOf(addr string) uint16 {
	_, text, _ := net.SplitHostPort(addr)
	port, _ := strconv.ParseUint(text, 10, 16)
	return uint16(port)
}
