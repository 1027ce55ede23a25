package iptables

import "slices"

// variant is the rules of a configuration, as such or without what this machine lacks.
type variant struct {
	rules   Rules
	without []string // what it lacks, as text for a log
	zone    uint16
}

// Level says how much of a family is captured.
type Level string

// The levels. Without a zone, queries of an application and of the agent from the same source
// port are taken for one flow.
const (
	LevelComplete    Level = "complete"
	LevelNoZone      Level = "without_zone"
	LevelNoComments  Level = "without_comments"
	LevelBare        Level = "without_zone_and_comments"
	LevelUnavailable Level = "unavailable" // this machine does not support it
	LevelFailed      Level = "failed"      // and retried
	LevelOff         Level = "off"         // not wanted
)

// AllLevels returns all levels.
func AllLevels() []Level {
	return []Level{LevelComplete, LevelNoZone, LevelNoComments, LevelBare, LevelUnavailable, LevelFailed, LevelOff}
}

// What a variant may lack, as text for a log.
const (
	lessZone     = "conntrack zone (target CT)"
	lessComments = "comments (match comment)"
)

// level returns the level of a family with these rules.
func (v variant) level() Level {
	zone, comments := slices.Contains(v.without, lessZone), slices.Contains(v.without, lessComments)
	switch {
	case zone && comments:
		return LevelBare
	case zone:
		return LevelNoZone
	case comments:
		return LevelNoComments
	}
	return LevelComplete
}

// variants returns the rules for a configuration, best first: as configured,
// without the conntrack zone, without comments, without either.
func variants(cfg Config) ([]variant, error) {
	const zone, comments = lessZone, lessComments
	noZone, noComments, bare := cfg, cfg, cfg
	noZone.Zone, bare.Zone = 0, 0
	noComments.NoComments, bare.NoComments = true, true
	var vs []variant
	for _, v := range []struct {
		cfg     Config
		without []string
	}{{cfg, nil}, {noZone, []string{zone}}, {noComments, []string{comments}}, {bare, []string{zone, comments}}} {
		rules, err := Build(v.cfg)
		if err != nil {
			return nil, err
		}
		lacksZone, lacksComments := slices.Contains(v.without, zone), slices.Contains(v.without, comments)
		if lacksZone && cfg.Zone == 0 || lacksComments && cfg.NoComments {
			continue // the configuration is without it already
		}
		vs = append(vs, variant{rules: rules, without: v.without, zone: v.cfg.Zone})
	}
	return vs, nil
}
