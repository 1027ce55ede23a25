// Package resolved makes systemd-resolved query the agent for mesh names.
//
// Programs that reach systemd-resolved by nss-resolve, D-Bus or varlink send no query that could be captured.
// systemd-resolved itself sends a query for most names, but never for names below .local, and never to port 53 if
// it uses DNS over TLS. So the agent creates a network interface, and registers itself as the nameserver of that
// interface, with the cluster domain, .local and the local-only suffixes as routing domains: queries for names below
// these domains go to the agent, and queries for all other names go to the same nameservers as before. Those queries
// are captured, unless they are sent over TLS.
//
// The interface carries no packet. systemd-resolved saves the settings of the interface in /run/systemd/resolve/netif,
// so they survive a restart of systemd-resolved. It forgets them when the interface is deleted.
//
//	registrar.go  Registrar: keeps the registration as desired
//	link.go       the network interface, over rtnetlink
//	bus.go        calls to systemd-resolved over D-Bus
//	helper.go     a helper that runs as root, and makes the calls that only root may make
package resolved
