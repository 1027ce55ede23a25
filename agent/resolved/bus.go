package resolved

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Names on the bus, from org.freedesktop.resolve1(5).
const (
	serviceName   = "org.freedesktop.resolve1"
	managerPath   = "/org/freedesktop/resolve1"
	managerMethod = serviceName + ".Manager."
	linkInterface = serviceName + ".Link"

	noSuchLink    = serviceName + ".NoSuchLink"
	linkBusy      = serviceName + ".LinkBusy"
	unknownMethod = "org.freedesktop.DBus.Error.UnknownMethod"
)

// callTimeout is how long one call over D-Bus may take.
const callTimeout = 5 * time.Second

// Errors that callers distinguish.
var (
	// errUnknownLink is returned if systemd-resolved does not see the interface.
	errUnknownLink = errors.New("systemd-resolved does not see the interface " + LinkName + ": it runs in another network namespace")
	// errDenied is returned if the caller may not change settings of systemd-resolved.
	errDenied = errors.New("only root may register with systemd-resolved: start nametap-resolved.socket, or run the agent as root")
)

// A Registration makes systemd-resolved send queries for names below Domains to
// Server, as the nameserver of an interface.
type Registration struct {
	Link    int            `json:"link"` // index of the interface
	Server  netip.AddrPort `json:"server"`
	Domains []string       `json:"domains"` // routing domains, without a trailing dot
}

// A bus is a connection to the system's D-Bus.
type bus struct {
	conn *dbus.Conn
	// changes receives a signal when systemd-resolved starts or ends. It is closed with conn.
	changes chan *dbus.Signal
}

// dialBus connects to D-Bus. The caller closes the bus.
func dialBus(ctx context.Context) (*bus, error) {
	// The connection lasts only as long as the context given to it. Therefore that context has no deadline: a timer
	// cancels it if connecting takes too long.
	connected, cancel := context.WithCancel(context.WithoutCancel(ctx))
	timer := time.AfterFunc(callTimeout, cancel)
	defer timer.Stop()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	conn, err := dbus.ConnectSystemBus(dbus.WithContext(connected))
	if err != nil {
		cancel()
		return nil, fmt.Errorf("connecting to D-Bus: %w", err)
	}
	b := &bus{conn: conn, changes: make(chan *dbus.Signal, 1)}
	conn.Signal(b.changes)
	err = conn.AddMatchSignalContext(ctx, dbus.WithMatchInterface("org.freedesktop.DBus"),
		dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, serviceName))
	if err != nil {
		b.close()
		return nil, fmt.Errorf("following systemd-resolved over D-Bus: %w", err)
	}
	return b, nil
}

// close closes the connection.
func (b *bus) close() { _ = b.conn.Close() }

// running reports whether systemd-resolved is on the bus. It does not start systemd-resolved.
func (b *bus) running(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var owned bool
	err := b.conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.NameHasOwner", 0, serviceName).Store(&owned)
	if err != nil {
		return false, fmt.Errorf("asking D-Bus for systemd-resolved: %w", err)
	}
	return owned, nil
}

// call calls a method of systemd-resolved. It does not start systemd-resolved.
func (b *bus) call(ctx context.Context, path dbus.ObjectPath, method string, args ...any) *dbus.Call {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return b.conn.Object(serviceName, path).CallWithContext(ctx, method, dbus.FlagNoAutoStart, args...)
}

// A server is a nameserver in the form of systemd-resolved.
type server struct {
	Family  int32
	Address []byte
	Port    uint16
	Name    string // the server's name in DNS over TLS
}

// A domain is a search or routing domain in the form of systemd-resolved.
type domain struct {
	Name        string
	RoutingOnly bool
}

// A link has the settings of an interface in systemd-resolved.
type link struct {
	servers []server
	domains []domain
	route   bool              // whether the interface also gets queries for names that are below no routing domain
	modes   map[string]string // the values of the properties in unwantedModes, by the name of the property
	inUse   bool              // whether the interface is used for DNS: it is up and has an address
}

// unwantedModes returns the properties of the interface that must be off. DNSSEC is off because mesh names are not
// signed, DNSOverTLS because the agent has no certificate, and LLMNR and MulticastDNS because the interface connects no
// other host. systemd-resolved has a method for each property, named after the property.
func unwantedModes() []string { return []string{"DNSSEC", "DNSOverTLS", "LLMNR", "MulticastDNS"} }

// modeOff is the value that each property in unwantedModes must have.
const modeOff = "no"

// link returns the settings of an interface in systemd-resolved.
func (b *bus) link(ctx context.Context, index int) (link, error) {
	var path dbus.ObjectPath
	if err := b.call(ctx, managerPath, managerMethod+"GetLink", int32(index)).Store(&path); err != nil { //nolint:gosec // an index is an int32
		return link{}, explain(err)
	}
	var properties map[string]dbus.Variant
	if err := b.call(ctx, path, "org.freedesktop.DBus.Properties.GetAll", linkInterface).Store(&properties); err != nil {
		return link{}, explain(err)
	}
	l := link{modes: map[string]string{}}
	for name, into := range map[string]any{"DNSEx": &l.servers, "Domains": &l.domains, "DefaultRoute": &l.route} {
		if v, found := properties[name]; found {
			if err := v.Store(into); err != nil {
				return link{}, fmt.Errorf("the property %s of systemd-resolved: %w", name, err)
			}
		}
	}
	for _, name := range unwantedModes() {
		l.modes[name], _ = properties[name].Value().(string)
	}
	scopes, _ := properties["ScopesMask"].Value().(uint64)
	l.inUse = scopes&1 != 0 // SD_RESOLVED_DNS
	return l, nil
}

// matches reports whether l has all settings that the registration r needs.
func (l link) matches(r Registration) bool {
	for _, mode := range unwantedModes() {
		if l.modes[mode] != modeOff {
			return false
		}
	}
	return !l.route && l.hasServer(r) && sameDomains(l.domains, wanted(r.Domains))
}

func (l link) hasServer(r Registration) bool {
	return slices.EqualFunc(l.servers, wantedServers(r), func(a, b server) bool {
		return a.Family == b.Family && slices.Equal(a.Address, b.Address) && a.Port == b.Port && a.Name == b.Name
	})
}

// sameDomains reports whether a and b have the same domains, in any order.
func sameDomains(a, b []domain) bool {
	return len(a) == len(b) && len(common(a, b)) == len(b)
}

// common returns the domains that a and b have in common, in the order of b.
func common(a, b []domain) []domain {
	known := map[domain]bool{}
	for _, d := range a {
		known[d] = true
	}
	return slices.DeleteFunc(slices.Clone(b), func(d domain) bool { return !known[d] })
}

// wanted returns names as routing domains in the form of systemd-resolved.
func wanted(names []string) []domain {
	domains := make([]domain, 0, len(names))
	for _, name := range names {
		domains = append(domains, domain{Name: name, RoutingOnly: true})
	}
	return domains
}

// wantedServers returns the nameserver of r in the form of systemd-resolved.
func wantedServers(r Registration) []server {
	addr := r.Server.Addr()
	s := server{Family: unix.AF_INET, Address: addr.AsSlice(), Port: r.Server.Port()}
	if addr.Is6() {
		s.Family = unix.AF_INET6
	}
	return []server{s}
}

// register makes a registration. It sets the nameserver last, because an interface without a nameserver has no
// effect. If the nameserver is already set, register changes only the settings that differ. Otherwise it makes all
// settings, even those that already look right: systemd-resolved reports its default for a setting that was never
// made, and the default may change.
func (b *bus) register(ctx context.Context, r Registration) error {
	l, err := b.link(ctx, r.Link)
	if err != nil {
		return err
	}
	index := int32(r.Link) //nolint:gosec // an index is an int32
	set := func(method string, value any) error {
		return explain(b.call(ctx, managerPath, managerMethod+"SetLink"+method, index, value).Err)
	}
	fresh := !l.hasServer(r)
	for _, mode := range unwantedModes() {
		if fresh || l.modes[mode] != modeOff {
			if err := set(mode, modeOff); err != nil {
				return err
			}
		}
	}
	if fresh || l.route {
		if err := set("DefaultRoute", false); err != nil {
			return err
		}
	}
	domains := wanted(r.Domains)
	if kept := common(l.domains, domains); len(kept) < len(l.domains) && len(l.domains)-len(kept)+len(domains) > maxDomains {
		// systemd-resolved adds up the domains that the call sets and the old domains that it removes. If the sum is
		// above the limit, it removes all domains and returns an error.
		if err := set("Domains", kept); err != nil {
			return err
		}
	}
	if !sameDomains(l.domains, domains) {
		if err := set("Domains", domains); err != nil {
			return err
		}
	}
	if fresh {
		return set("DNSEx", wantedServers(r))
	}
	return nil
}

// flush empties the caches of systemd-resolved, which may have negative answers for names that the
// mesh now has.
func (b *bus) flush(ctx context.Context) error {
	return explain(b.call(ctx, managerPath, managerMethod+"FlushCaches").Err)
}

// explain returns an error that says what err, an error of D-Bus, means.
func explain(err error) error {
	var failure dbus.Error
	if !errors.As(err, &failure) {
		return err
	}
	switch failure.Name {
	case noSuchLink:
		return errUnknownLink
	case linkBusy:
		return fmt.Errorf("systemd-networkd manages the interface %s; after the installation, run `networkctl reload`: %w", LinkName, err)
	case unknownMethod:
		return fmt.Errorf("systemd-resolved is older than version 246: %w", err)
	case "org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired":
		return fmt.Errorf("%w (%w)", errDenied, err)
	}
	return fmt.Errorf("systemd-resolved: %w", err)
}
