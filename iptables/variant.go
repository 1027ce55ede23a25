package iptables

// A variant has the rules of a configuration: complete, or in table nat alone.
type variant struct {
	rules   Rules
	omitted []string // the parts that are left out, as text for a log
	zone    uint16
	lease   bool
}

// level returns the level of a family with these rules.
func (v variant) level() Level {
	if len(v.omitted) > 0 {
		return LevelReduced
	}
	return LevelComplete
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

// variants returns the rules for a configuration, best first: as configured, and in table nat alone, for a machine that
// lacks something that the other rules need.
func variants(cfg Config) ([]variant, error) {
	rules, err := Build(cfg)
	if err != nil {
		return nil, err
	}
	if cfg.NATOnly {
		return []variant{{rules: rules}}, nil
	}
	cfg.NATOnly = true
	reduced, err := Build(cfg)
	return []variant{{rules: rules, zone: zone, lease: cfg.Lease}, {rules: reduced, omitted: []string{
		"conntrack zone (target CT)", "end by the kernel (match recent)", "rules for firewalls (match conntrack)", "comments (match comment)"}}}, err
}

// withoutFilter returns the variants without the rules of table filter. iptables cannot read the table if the nft tool has
// added rules to it.
func withoutFilter(vs []variant) (without []variant) {
	for n, v := range vs {
		v.rules = v.rules.sparing(filterTable)
		if n == 0 {
			v.omitted = []string{"rules for firewalls (table filter " + errIncompatible + ")"}
		}
		without = append(without, v)
	}
	return without
}
