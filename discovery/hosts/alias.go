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

// setTarget sets the host whose addresses an alias has, and the name of that host. An alias of
// itself, directly or by way of others, has none.
func (h *Hosts) setTarget(host *Host) {
	if host == nil {
		return
	}
	delete(h.loops, host.Key)
	seen := map[string]bool{}
	for key, name := host.Key, ""; ; {
		next, isAlias := h.alias(key)
		if !isAlias {
			if name != "" {
				host.target, host.alias = h.host(key), name
			}
			return
		}
		if seen[key] {
			h.loops[host.Key] = true
			return
		}
		seen[key] = true
		name = strings.TrimSuffix(next, ".")
		key = h.covering(hostKey(name))
	}
}

// alias returns what a host is an alias of. A host that has an address itself is no alias.
func (h *Hosts) alias(key string) (string, bool) {
	alias := ""
	for _, c := range h.byHost[key] {
		if c.addressed() {
			return "", false
		}
		if alias == "" {
			alias = c.alias
		}
	}
	return alias, alias != ""
}

// covering returns the key of a host, or that of the closest wildcard that covers it.
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
