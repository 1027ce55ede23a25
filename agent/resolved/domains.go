package resolved

import (
	"cmp"
	"slices"
	"strings"
)

// maxDomains is how many domains systemd-resolved accepts for one interface
// (LINK_SEARCH_DOMAINS_MAX; measured with version 252).
const maxDomains = 256

// choose returns the domains to register, at most maxDomains, and how many further domains are not registered. The
// required domains come first. Then come the domains below .local, because without a registration systemd-resolved
// queries no nameserver for them. All other domains come last, domains with few labels first.
//
// Of a domain below .local, only the last two labels are registered, such as cluster.local for svc.cluster.local. The
// other names of two labels, such as printer.local, stay with multicast DNS. Its names never have more than two labels.
//
// All other domains are registered as they are. If choose registered their parents instead, to save room, the agent
// would also get queries for other names below the parents. Those names may have nameservers of their own, such as the
// nameservers of a VPN, and systemd-resolved would no longer validate them by DNSSEC.
func choose(required, domains []string) (chosen []string, others int) {
	all := make([]string, 0, len(required)+len(domains))
	for _, name := range required {
		all = append(all, strings.ToLower(name))
	}
	fixed := len(all)
	for _, name := range domains {
		if name = localParent(name); isHostname(name) {
			all = append(all, name)
		}
	}
	slices.SortFunc(all[fixed:], func(a, b string) int {
		return cmp.Or(-cmp.Compare(score(a), score(b)), cmp.Compare(strings.Count(a, "."), strings.Count(b, ".")), cmp.Compare(a, b))
	})
	known := make(map[string]bool, min(len(all), maxDomains))
	for _, name := range all {
		switch {
		case covered(name, known):
		case len(chosen) == maxDomains:
			others++
		default:
			known[name] = true
			chosen = append(chosen, name)
		}
	}
	return chosen, others
}

// score is higher for domains that matter more.
func score(name string) int {
	if isLocal(name) {
		return 1
	}
	return 0
}

func isLocal(name string) bool { return strings.HasSuffix(name, ".local") }

// localParent returns the last two labels of a name below .local, and any other name
// unchanged.
func localParent(name string) string {
	if !isLocal(name) {
		return name
	}
	head := strings.TrimSuffix(name, ".local")
	return name[strings.LastIndexByte(head, '.')+1:]
}

// covered reports whether a name is a known domain or below a known domain.
func covered(name string, known map[string]bool) bool {
	for {
		if known[name] {
			return true
		}
		_, parent, found := strings.Cut(name, ".")
		if !found {
			return false
		}
		name = parent
	}
}

// isHostname reports whether the labels of a name have only letters, digits, hyphens and underscores.
// systemd-resolved escapes other characters, so the domains that it returns would differ from the registered ones.
func isHostname(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	})
}
