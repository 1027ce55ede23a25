package main

import (
	"fmt"
	"net"
	"net/netip"
	"os/user"
	"strconv"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// addressesAge is how long the addresses of this host are used.
const addressesAge = 5 * time.Second

// clientNames names the clients of queries for people.
type clientNames struct {
	users   map[uint32]string // "" without a name
	local   map[netip.Addr]bool
	localAt time.Time
}

// of returns the unit or else the name of the user that a query came from, with the uid. Of a client that was not looked up
// it returns its address, unless that is one of this host: nameservers here have such addresses, too.
func (c *clientNames) of(r *seen.Record) string {
	name := r.Unit
	if r.UID != nil {
		if name == "" {
			name = c.user(*r.UID)
		}
		if name == "" {
			return fmt.Sprintf("uid %d", *r.UID)
		}
		return fmt.Sprintf("%s (uid %d)", printable(name), *r.UID)
	}
	switch {
	case name != "":
		return printable(name)
	case c.isLocal(r.Client.Addr()):
		return "a local program"
	}
	return r.Client.Addr().String()
}

// user returns the name of a user, "" if it has none.
func (c *clientNames) user(uid uint32) string {
	name, known := c.users[uid]
	if known {
		return name
	}
	if found, err := user.LookupId(strconv.FormatUint(uint64(uid), 10)); err == nil {
		name = found.Username
	}
	if c.users == nil {
		c.users = map[uint32]string{}
	}
	c.users[uid] = name
	return name
}

// isLocal reports whether an address is one of this host.
func (c *clientNames) isLocal(addr netip.Addr) bool {
	if now := time.Now(); now.Sub(c.localAt) > addressesAge {
		c.local, c.localAt = map[netip.Addr]bool{}, now
		addresses, _ := net.InterfaceAddrs() // without them, addresses are shown
		for _, a := range addresses {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				c.local[prefix.Addr()] = true
			}
		}
	}
	return addr.IsLoopback() || c.local[addr.Unmap().WithZone("")]
}
