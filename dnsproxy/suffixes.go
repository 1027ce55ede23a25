package dnsproxy

import (
	"fmt"
	"slices"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// suffixRules are the suffixes for whose names settings say who answers. Of those that
// a name is below the longest decides, and of two of one length bypass. The zero value
// has no suffixes.
type suffixRules struct {
	bypass    []wire.Name // nameservers answer, as if the table had no such host; longest first
	localOnly []wire.Name // nameservers are never asked; longest first
}

// bypasses reports whether name goes to nameservers even if the table has it.
func (r *suffixRules) bypasses(name wire.Name) bool {
	if len(r.bypass) == 0 {
		return false
	}
	suffix, found := belowAny(name, r.bypass)
	if !found {
		return false
	}
	zone, localOnly := belowAny(name, r.localOnly)
	return !localOnly || len(suffix) >= len(zone)
}

// bypassesHost reports whether nameservers answer for all names of a host. Of those
// below a wildcard each has to be asked about.
func (r *suffixRules) bypassesHost(h *host) bool {
	return !h.wildcard() && r.bypasses(h.name)
}

// local returns the suffix that keeps name from nameservers.
func (r *suffixRules) local(name wire.Name) (zone wire.Name, found bool) {
	zone, found = belowAny(name, r.localOnly)
	return zone, found && !r.bypasses(name)
}

// localSearched is like local for a name that may have a domain of the search list
// behind it: a client's resolver asks for those first, and they say as much. base is the
// name without that domain, zone the suffix with it.
func (r *suffixRules) localSearched(name wire.Name, search []wire.Name) (base, zone wire.Name, found bool) {
	if len(r.localOnly) == 0 {
		return name, wire.Root, false
	}
	if zone, found := r.local(name); found {
		return name, zone, true
	}
	bypass, _ := belowAny(name, r.bypass)
	for _, domain := range search {
		base, ok := name.CutSuffix(domain)
		if !ok {
			continue
		}
		zone, found := r.local(base)
		if whole := name[len(base)-len(zone):]; found && len(whole) > len(bypass) {
			return base, whole, true
		}
	}
	return name, wire.Root, false
}

// withoutBypassed removes the bypassed ones from names, which it changes.
func (r *suffixRules) withoutBypassed(names []wire.Name) []wire.Name {
	if len(r.bypass) == 0 {
		return names
	}
	kept := names[:0]
	for _, name := range names {
		if !r.bypasses(name) {
			kept = append(kept, name)
		}
	}
	return kept
}

// belowAny returns the first of suffixes that name is or is below.
func belowAny(name wire.Name, suffixes []wire.Name) (suffix wire.Name, found bool) {
	for _, suffix := range suffixes {
		if name.Below(suffix) {
			return suffix, true
		}
	}
	return wire.Root, false
}

// parseSuffixes reads the domain names that a setting lists, and returns them longest
// first.
func parseSuffixes(setting string, names []string) ([]wire.Name, error) {
	var suffixes []wire.Name
	for _, name := range names {
		suffix, err := wire.ParseHostname(name)
		if err != nil {
			return nil, fmt.Errorf("%s %q: want a domain name: %w", setting, name, err)
		}
		suffixes = append(suffixes, suffix)
	}
	slices.SortStableFunc(suffixes, func(x, y wire.Name) int { return len(y) - len(x) })
	return suffixes, nil
}
