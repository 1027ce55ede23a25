package table

import (
	"fmt"
	"slices"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// Suffixes are two lists of suffixes from the settings. Names below a suffix in Bypass are forwarded; the table is
// not used for them. Names below a suffix in LocalOnly are never forwarded. If a name has suffixes in both lists,
// the longest one decides; of two equal suffixes, the one in Bypass decides. The zero value has no suffixes.
type Suffixes struct {
	Bypass    []wire.Name // the longest first
	LocalOnly []wire.Name // the longest first
}

// Bypasses reports whether queries for name are forwarded even if the table has it.
func (s *Suffixes) Bypasses(name wire.Name) bool {
	if len(s.Bypass) == 0 {
		return false
	}
	suffix, found := name.BelowAny(s.Bypass)
	if !found {
		return false
	}
	zone, localOnly := name.BelowAny(s.LocalOnly)
	return !localOnly || len(suffix) >= len(zone)
}

// bypassesHost reports whether queries for all names of a host are forwarded, because its FQDN, or the host of which
// it is an alias, is bypassed. It does not look at the name of a wildcard: the names below a wildcard must be
// checked one by one.
func (s *Suffixes) bypassesHost(h *Host) bool {
	if len(s.Bypass) == 0 {
		return false
	}
	return h.isAlias() && s.Bypasses(h.Alias()) || !h.wildcard() && s.Bypasses(h.Name)
}

// Local returns the local-only suffix that keeps name from being forwarded.
func (s *Suffixes) Local(name wire.Name) (zone wire.Name, found bool) {
	zone, found = name.BelowAny(s.LocalOnly)
	return zone, found && !s.Bypasses(name)
}

// LocalSearched is like Local, but also finds a local-only name to which a client's resolver has added a domain of
// its search list. Such a name must not be forwarded either, because it would reveal the local-only name to
// nameservers. base is the name without that domain, and zone is the suffix followed by the domain.
func (s *Suffixes) LocalSearched(name wire.Name, search []wire.Name) (base, zone wire.Name, found bool) {
	if len(s.LocalOnly) == 0 {
		return name, wire.Root, false
	}
	if zone, found := s.Local(name); found {
		return name, zone, true
	}
	bypass, _ := name.BelowAny(s.Bypass)
	for _, domain := range search {
		base, ok := name.CutSuffix(domain)
		if !ok {
			continue
		}
		zone, found := s.Local(base)
		if whole := name[len(base)-len(zone):]; found && len(whole) > len(bypass) {
			return base, whole, true
		}
	}
	return name, wire.Root, false
}

// Strictest returns suffixes that forward a name only if both s and other forward it.
func (s *Suffixes) Strictest(other Suffixes) Suffixes {
	var both Suffixes
	for _, suffix := range s.Bypass {
		if slices.Contains(other.Bypass, suffix) {
			both.Bypass = append(both.Bypass, suffix)
		}
	}
	both.LocalOnly = slices.Concat(s.LocalOnly, other.LocalOnly)
	slices.SortStableFunc(both.LocalOnly, longestFirst)
	return both
}

func longestFirst(x, y wire.Name) int { return len(y) - len(x) }

// ParseSuffixes parses the domain names of a setting, and returns them, the longest first. setting is the name of the
// setting, for errors.
func ParseSuffixes(setting string, names []string) ([]wire.Name, error) {
	var suffixes []wire.Name
	for _, name := range names {
		suffix, err := wire.ParseHostname(name)
		if err != nil {
			return nil, fmt.Errorf("%s %q: want a domain name: %w", setting, name, err)
		}
		suffixes = append(suffixes, suffix)
	}
	slices.SortStableFunc(suffixes, longestFirst)
	return suffixes, nil
}
