// Package resolved makes systemd-resolved ask the agent for mesh names.
//
// Programs that ask systemd-resolved by nss-resolve, D-Bus or varlink send no query that could
// be captured. systemd-resolved sends one for most names, but never for names below .local, and
// none to port 53 if it uses DNS over TLS. So the agent registers itself as the nameserver of a
// network interface of its own, with the domains of the mesh as routing domains: names below
// them go to the agent, and all other names go where they went before.
//
// The interface carries no packet. systemd-resolved forgets all about it when it is deleted,
// and keeps its settings over a restart of its own in /run/systemd/resolve/netif. To delete it
// takes CAP_NET_ADMIN and no D-Bus.
//
//	registrar.go  Registrar: keeps the registration as desired
//	domains.go    which domains are registered, and the limit
//	link.go       the network interface, over rtnetlink
//	bus.go        calls to systemd-resolved over D-Bus
//	helper.go     the calls that only root may make, made by a helper for the agent
//	status.go     what of a registration is in force
package resolved
