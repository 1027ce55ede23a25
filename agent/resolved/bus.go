package resolved

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Names on the bus, from org.freedesktop.resolve1(5).
const (
	serviceName   = "org.freedesktop.resolve1"
	managerPath   = "/org/freedesktop/resolve1"
	managerMethod = serviceName + ".Manager."
	linkInterface = serviceName + ".Link"
)

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

// A property is a property that an interface has in systemd-resolved. The method that sets it is called after it.
type property struct {
	name  string
	value any
}

// properties returns the properties of the interface. The nameserver is the last one, because an interface without a
// nameserver has no effect. DNSSEC is off because mesh names are not signed, DNSOverTLS because the agent has no
// certificate, and LLMNR and MulticastDNS because the interface connects no other host.
func (r Registration) properties() []property {
	addr := r.Server.Addr()
	own := server{Family: unix.AF_INET, Address: addr.AsSlice(), Port: r.Server.Port()}
	if addr.Is6() {
		own.Family = unix.AF_INET6
	}
	domains := make([]domain, len(r.Domains))
	for i, name := range r.Domains {
		domains[i] = domain{Name: name, RoutingOnly: true}
	}
	return []property{
		{"DNSSEC", "no"}, {"DNSOverTLS", "no"}, {"LLMNR", "no"}, {"MulticastDNS", "no"},
		{"DefaultRoute", false}, {"Domains", domains}, {"DNSEx", []server{own}},
	}
}

// in reports whether p is one of the properties that systemd-resolved has sent.
func (p property) in(sent map[string]dbus.Variant) bool {
	value := reflect.New(reflect.TypeOf(p.value))
	return sent[p.name].Store(value.Interface()) == nil && reflect.DeepEqual(value.Elem().Interface(), p.value)
}

// A bus is a connection to the system's D-Bus.
type bus struct{ conn *dbus.Conn }

// dialBus connects to D-Bus. The connection lasts until ctx ends, or until the caller closes the bus.
func dialBus(ctx context.Context) (bus, error) {
	conn, err := dbus.ConnectSystemBus(dbus.WithContext(ctx))
	if err != nil {
		return bus{}, fmt.Errorf("connecting to D-Bus: %w", err)
	}
	return bus{conn}, nil
}

// close closes the connection.
func (b bus) close() { _ = b.conn.Close() }

// running reports whether systemd-resolved is on the bus. It does not start systemd-resolved.
func (b bus) running(ctx context.Context) (owned bool, err error) {
	err = b.conn.BusObject().CallWithContext(ctx, "org.freedesktop.DBus.NameHasOwner", 0, serviceName).Store(&owned)
	if err != nil {
		return false, fmt.Errorf("asking D-Bus for systemd-resolved: %w", err)
	}
	return owned, nil
}

// call calls a method of systemd-resolved, and stores its result in values. It does not start systemd-resolved.
func (b bus) call(ctx context.Context, path dbus.ObjectPath, method string, args []any, values ...any) error {
	call := b.conn.Object(serviceName, path).CallWithContext(ctx, method, dbus.FlagNoAutoStart, args...)
	return explain(call.Store(values...))
}

// registered reports whether systemd-resolved has a registration.
func (b bus) registered(ctx context.Context, r Registration) (bool, error) {
	var path dbus.ObjectPath
	if err := b.call(ctx, managerPath, managerMethod+"GetLink", []any{int32(r.Link)}, &path); err != nil { //nolint:gosec // an index is an int32
		return false, err
	}
	var sent map[string]dbus.Variant
	if err := b.call(ctx, path, "org.freedesktop.DBus.Properties.GetAll", []any{linkInterface}, &sent); err != nil {
		return false, err
	}
	for _, p := range r.properties() {
		if !p.in(sent) {
			return false, nil
		}
	}
	return true, nil
}

// register makes a registration. It sets all properties: systemd-resolved reports its default for a property that was
// never set, and the default may change.
func (b bus) register(ctx context.Context, r Registration) error {
	for _, p := range r.properties() {
		if err := b.call(ctx, managerPath, managerMethod+"SetLink"+p.name, []any{int32(r.Link), p.value}); err != nil { //nolint:gosec // an index is an int32
			return err
		}
	}
	return nil
}

// explain returns an error that says what err, an error of D-Bus, means.
func explain(err error) error {
	var failure dbus.Error
	if !errors.As(err, &failure) {
		return err
	}
	switch failure.Name {
	case serviceName + ".NoSuchLink":
		return errUnknownLink
	case serviceName + ".LinkBusy":
		return fmt.Errorf("systemd-networkd manages the interface %s; after the installation, run `networkctl reload`: %w", LinkName, err)
	case "org.freedesktop.DBus.Error.UnknownMethod":
		return fmt.Errorf("systemd-resolved is older than version 246: %w", err)
	case "org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired":
		return fmt.Errorf("%w (%w)", errDenied, err)
	}
	return fmt.Errorf("systemd-resolved: %w", err)
}
