package hosts

import (
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// targetKey returns the key of the host that an alias stands for.
func targetKey(alias string) string { return hostKey(strings.TrimSuffix(alias, ".")) }

// addTarget notes that a host has a claim with an alias, unless that is empty.
func (h *Hosts) addTarget(alias, host string) {
	if alias != "" {
		innerMap(h.aliases, targetKey(alias))[host] = true
	}
}

// removeTarget is called after a claim with an alias was removed from a host. Services of several
// clusters may have the same alias.
func (h *Hosts) removeTarget(alias, host string) {
	if alias == "" {
		return
	}
	target := targetKey(alias)
	if !slices.ContainsFunc(h.byHost[host], func(c claimOf) bool { return c.alias != "" && targetKey(c.alias) == target }) {
		removeInner(h.aliases, target, host)
	}
}

// addAliases adds the aliases of changed hosts, and their aliases.
func (h *Hosts) addAliases(changed map[string]bool) {
	if len(h.aliases) == 0 {
		return
	}
	todo := sortedKeys(changed)
	add := func(hosts map[string]bool) {
		for host := range hosts {
			if !changed[host] {
				changed[host] = true
				todo = append(todo, host)
			}
		}
	}
	for len(todo) > 0 {
		key := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		add(h.aliases[key])
		if object.IsWildcard(key) {
			for target, hosts := range h.aliases {
				if strings.HasSuffix(target, key[1:]) {
					add(hosts)
				}
			}
		}
	}
}

// aliasEnd is where the aliases of a host end: at the host with the key target, whose name is name. The name is empty
// for a host that is no alias. With loop they do not end: the host is an alias of itself, directly or by way of others.
type aliasEnd struct {
	target, name string
	loop         bool
}

// setTargets sets the hosts whose addresses aliases have, and their names. An alias of itself has none.
func (h *Hosts) setTargets(changes []HostChange) {
	ends := map[string]aliasEnd{}
	for _, c := range changes {
		host := c.New
		if host == nil {
			continue
		}
		delete(h.loops, host.Key)
		switch end := h.aliasEnd(host.Key, ends); {
		case end.loop:
			h.loops[host.Key] = true
		case end.name != "":
			host.target, host.alias = h.host(end.target), end.name
		}
	}
}

// aliasEnd returns where the aliases of a host end. known has the ends that were found before, since aliases of the same
// host may be many, and a row of them long.
func (h *Hosts) aliasEnd(key string, known map[string]aliasEnd) aliasEnd {
	type step struct{ key, name string }
	var steps []step
	end, found := known[key]
	for !found {
		next, isAlias := h.alias(key)
		if !isAlias {
			end = aliasEnd{target: key}
			break
		}
		known[key] = aliasEnd{loop: true} // if the row comes back to it
		name := strings.TrimSuffix(next, ".")
		steps = append(steps, step{key, name})
		key = h.covering(hostKey(name))
		end, found = known[key]
	}
	for _, s := range slices.Backward(steps) {
		if end.name == "" && !end.loop {
			end.name = s.name
		}
		known[s.key] = end
	}
	return end
}

// alias returns what a host is an alias of. A host that has an address itself is no alias.
func (h *Hosts) alias(key string) (string, bool) {
	alias := ""
	for _, c := range counting(h.byHost[key]) {
		if c.addressed() {
			return "", false
		}
		if alias == "" {
			alias = c.alias
		}
	}
	return alias, alias != ""
}

// covering returns key if objects claim that host, otherwise the closest wildcard that covers
// it; without either, key.
func (h *Hosts) covering(key string) string {
	if len(h.byHost[key]) > 0 {
		return key
	}
	for rest := key; ; {
		_, parent, found := strings.Cut(rest, ".")
		if !found {
			return key
		}
		if wildcard := "*." + parent; len(h.byHost[wildcard]) > 0 {
			return wildcard
		}
		rest = parent
	}
}
