package main

import (
	"os/user"
	"strconv"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// clientNames names the clients of queries for people.
type clientNames struct {
	users map[uint32]string // "" without a name
	host  seen.HostAddrs
}

// of returns the unit or else the name of the user that a query came from, with the uid. Of a client that was not looked up
// it returns its address, unless that is one of this host: nameservers here have such addresses, too.
func (c *clientNames) of(r *seen.Record) string {
	named := *r
	switch {
	case r.Unit != "":
	case r.UID != nil:
		named.Unit = c.user(*r.UID)
	case c.host.Has(r.Client.Addr().Unmap(), time.Now()):
		return "a local program"
	}
	return printable(named.Who())
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
