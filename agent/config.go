package agent

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/dnstap"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/iptables"
	"github.com/nametap/nametap/nds"
)

// statusSetting names [Config.StatusAddr] in errors.
const statusSetting = "status-addr"

// A Config configures an [Agent].
type Config struct {
	// DNS configures the query path. New sets its Inherited, Logger and Registerer, and the fields Clock, AddressesChanged
	// and Control of its Forward.
	DNS dnsproxy.Config
	// XDS configures the push path. New sets its Logger, Registerer, Changed, Handled and Resolver. If XDS.Clock is nil,
	// New also sets that field.
	XDS nds.Config
	// StatusAddr is the host:port of the status endpoints: an IP address, localhost, or no host for all addresses. Port
	// 0 means a free port.
	StatusAddr string
	// Inherited has sockets that another process holds; nil for none. New uses those on the ports of the settings, and
	// closes the others.
	Inherited *listen.Inherited
	// SocketDirs are the directories in which the socket of the private status endpoints may be:
	// see [SocketDirs]. If the list is empty, there are no private endpoints.
	SocketDirs []string
	// StateDirRequired makes New return an error if the state directory (XDS.StateDir) cannot be used, unless its disk is
	// full or faulty. Otherwise the agent logs the error, and tries to write at each push.
	StateDirRequired bool
	// Drain is how long the agent still answers queries and carries connections to VIPs before it ends. With 0 the
	// agent ends at once.
	Drain time.Duration
	// Service is true if systemd runs the agent as a unit. The unit restarts the agent when it ends, and holds its
	// sockets: queries wait in the sockets during the restart.
	Service bool
	// DrainCaptured makes an agent with Service drain after it has removed its rules.
	DrainCaptured bool
	// ReadyTimeout is how long the agent waits for a table. After that it reports that it is ready, because a pod
	// or a VM must start even without a control plane.
	ReadyTimeout time.Duration
	// Capture configures the redirection of queries to the agent. If it is nil, the agent redirects no query.
	Capture *CaptureConfig
	// Egress configures the connections to automatic VIPs. New sets its Inherited, Table, Synced, Resolve,
	// OwnPorts, Opened, Drain, Logger and Registerer. If Egress is nil, the agent carries no such connections.
	Egress *egress.Config
	// Guard has the policy that says which names outside of the mesh clients may ask for and reach. The caller changes the
	// policy while the agent runs ([guard.Guard.Use]). New passes Guard to DNS and Egress. Nil allows everything.
	Guard *guard.Guard
	// Records says which queries are logged and sent to a receiver of dnstap.
	Records RecordsConfig
	// Identity is the name of this agent in messages of dnstap.
	Identity string
	// Supervised is true if a supervisor restarts the agent when it ends: an agent that hangs then ends itself.
	// Restarts is how often the supervisor has done so.
	Supervised bool
	Restarts   int
	// Settings returns, by name, the settings in use that were set. The commands for capture read them. Settings may be nil.
	Settings func() map[string][]string
	// Conditions says what is wrong with the settings files. It may be nil.
	Conditions func() []condition.Condition
	// DNSSettings returns, by name, the settings in use that [Agent.Configure] can change and that differ from their
	// defaults. The status shows them. DNSSettings may be nil.
	DNSSettings func() map[string][]string
	// Logger is the log.
	Logger *slog.Logger
	// Collectors are added to the agent's metrics.
	Collectors []prometheus.Collector
}

// DefaultConfig returns a Config with all defaults. It captures nothing. The caller must add the settings that have no
// default: a logger, and the name and the addresses of the node.
func DefaultConfig() Config {
	return Config{
		DNS: dnsproxy.DefaultConfig(), XDS: nds.DefaultConfig(),
		StatusAddr: ":15020", Drain: 5 * time.Second, ReadyTimeout: 30 * time.Second,
		Records: RecordsConfig{QueryLog: querylog.Failed},
	}
}

// Validate returns an error if a setting is wrong. It opens no socket. It makes the state directory if
// StateDirRequired is set. [New] calls Validate.
func (c Config) Validate() error {
	_, _, statusErr := listen.SplitAddr(statusSetting, c.StatusAddr)
	errs := []error{c.DNS.Validate(), c.XDS.Validate(), statusErr, c.checkStateDir()}
	if c.Egress != nil {
		errs = append(errs, c.Egress.Validate())
	}
	return errors.Join(errs...)
}

// checkStateDir returns an error if the state directory is required and cannot be used.
func (c *Config) checkStateDir() error {
	if !c.StateDirRequired || c.XDS.StateDir == "" {
		return nil
	}
	if err := statedir.Check(c.XDS.StateDir); err != nil && !statedir.Passing(err) {
		return fmt.Errorf("state directory %q: want a writable directory that exists or can be created (--state-dir): %w", c.XDS.StateDir, err)
	}
	return nil
}

// prepareStateDir makes the directory of the snapshot. Without the directory, a restart while the control plane is down
// loses the mesh names, but all other names are still answered. So a failure is only logged.
func (c *Config) prepareStateDir() {
	if c.XDS.StateDir == "" {
		return
	}
	if err := statedir.Check(c.XDS.StateDir); err != nil {
		c.Logger.Warn("the table cannot be saved: after a restart without the control plane there are no mesh names; set --state-dir",
			"dir", c.XDS.StateDir, "error", err)
	}
}

// setClock gives one clock to the query path and to the push path, and returns it as pollClock. If the caller has
// given the push path another clock, the push path keeps that clock. setClock also makes a channel for each path. A
// value in the channel tells the path that addresses of interfaces have changed.
func (c *Config) setClock() (pollClock *clock.Clock, changed [2]chan struct{}) {
	pollClock = clock.New()
	c.DNS.Forward.Clock, c.XDS.Clock = pollClock, cmp.Or(c.XDS.Clock, pollClock)
	changed = [2]chan struct{}{make(chan struct{}, 1), make(chan struct{}, 1)}
	c.DNS.Forward.AddressesChanged, c.XDS.Changed = changed[0], changed[1]
	return pollClock, changed
}

// A CaptureConfig says which queries are redirected to the agent. [Agent.SetCapture] changes it while the agent runs.
// SetCapture does not change the resolv.conf that the agent follows, or the port on which it listens.
type CaptureConfig struct {
	// On is true if DNS is captured; Because names the setting that decides this.
	On      bool
	Because string
	// Config says what is captured. If Servers is ResolvConfServers, the nameservers of
	// ResolvConf replace Config.Servers.
	Config iptables.Config
	// Servers says for which nameservers queries are captured. The default is all.
	Servers CaptureServers
	// ResolvConf is the path of a resolv.conf. The agent follows its changes. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Resolved registers the agent with systemd-resolved while the agent captures. It has no effect on a host without
	// systemd-resolved.
	Resolved bool
}

// CaptureServers says for which nameservers queries are captured.
type CaptureServers string

// The values of CaptureServers.
const (
	// AllServers captures queries to any server. The zero value means the same.
	AllServers CaptureServers = "all"
	// ResolvConfServers captures queries to the nameservers of resolv.conf.
	ResolvConfServers CaptureServers = "resolv-conf"
)

// A RecordsConfig says which queries are logged, and where dnstap messages are sent.
type RecordsConfig struct {
	// QueryLog says which queries are logged. "" logs none.
	QueryLog querylog.Mode
	// Dnstap is the receiver of queries and responses. The zero value sends none.
	Dnstap dnstap.Target
}

// portOf returns the port of addr, a host:port that was checked before. It is 0 if the kernel chooses the port.
func portOf(addr string) uint16 {
	_, text, _ := net.SplitHostPort(addr)
	port, _ := strconv.ParseUint(text, 10, 16)
	return uint16(port)
}
