package iptables

import (
	"fmt"
	"slices"
	"sort"
)

// A variant has the rules of a configuration, complete or without parts that this machine does not support.
type variant struct {
	rules   Rules
	omitted []string // the parts that are left out, as text for a log
	zone    uint16
	lease   bool
	accepts bool
}

// level returns the level of a family with these rules.
func (v variant) level() Level {
	if len(v.omitted) > 0 {
		return LevelReduced
	}
	return LevelComplete
}

// orLess returns v and the variants that come after v in vs. No such variant is better than v, because vs begins
// with the best. If v is not in vs, orLess returns all of vs.
func (v variant) orLess(vs []variant) []variant {
	better := slices.IndexFunc(vs, func(other variant) bool { return slices.Equal(other.omitted, v.omitted) })
	return vs[max(better, 0):]
}

// Level says how much of a family is captured.
type Level string

// The levels.
const (
	LevelComplete    Level = "complete"
	LevelReduced     Level = "reduced"     // the rules leave out something that this machine lacks
	LevelUnavailable Level = "unavailable" // this machine does not support the family
	LevelFailed      Level = "failed"      // installing the rules failed, and is retried
	LevelOff         Level = "off"         // the family is not to be captured
)

// variants returns the rules for a configuration, best first. The first variant is as configured. The other
// variants leave out one part, then two parts, and so on, in all combinations.
func variants(cfg Config) ([]variant, error) {
	var vs []variant
	for choice := range 1 << len(parts()) {
		v, reduced, included := variant{}, cfg, true
		for i, p := range parts() {
			if choice&(1<<i) != 0 {
				included = p.omit(&reduced) && included
				v.omitted = append(v.omitted, p.name)
			}
		}
		if !included {
			continue // the configuration itself leaves out one of the parts
		}
		var err error
		if v.rules, err = Build(reduced); err != nil {
			return nil, err
		}
		v.zone, v.lease, v.accepts = reduced.Zone, reduced.Lease, !reduced.NoAccept
		vs = append(vs, v)
	}
	sort.SliceStable(vs, func(i, j int) bool { return len(vs[i].omitted) < len(vs[j].omitted) })
	return vs, nil
}

// parts returns the parts of the rules that a machine may lack, the least important first. Each has a name, as text
// for a log, and a function that leaves it out of a configuration. The function returns true if the configuration
// had the part.
func parts() []part {
	return []part{
		{"comments (match comment)", func(c *Config) bool { included := !c.NoComments; c.NoComments = true; return included }},
		{"probes (match ttl, hl)", func(c *Config) bool { included := !c.NoProbe; c.NoProbe = true; return included }},
		{"rules for firewalls (table filter, match conntrack)", func(c *Config) bool { included := !c.NoAccept; c.NoAccept = true; return included }},
		{"end by the kernel (match recent)", func(c *Config) bool { included := c.Lease; c.Lease = false; return included }},
		{"conntrack zone (target CT)", func(c *Config) bool { included := c.Zone != 0; c.Zone = 0; return included }},
	}
}

type part struct {
	name string
	omit func(*Config) (included bool)
}

// possibleVariants returns the variants of the rules of a family that this machine may support. If iptables cannot
// read table filter, the variants that change this table are left out, and the error lacks gives the reason.
func possibleVariants(vs []variant, inKernel saved) (supported []variant, lacks error) {
	if t := inKernel[filterTable]; t == nil || !t.unreadable || !vs[0].accepts {
		return vs, nil
	}
	supported = slices.DeleteFunc(slices.Clone(vs), func(v variant) bool { return v.accepts })
	return supported, fmt.Errorf("%w: table %q %w", errExtension, filterTable, errIncompatible)
}
