package iptables

// The names of nametap's chains.
const (
	ownPrefix       = "NAMETAP_"
	outputChain     = ownPrefix + "OUTPUT"
	preroutingChain = ownPrefix + "PREROUTING"
	inputChain      = ownPrefix + "INPUT"
)

// tableNames returns the tables that nametap uses, in the order in which they are changed.
func tableNames() []string { return []string{filterTable, "nat", "raw"} }

// filterTable is the table of firewalls.
const filterTable = "filter"

// zone is the conntrack zone of captured UDP queries. Without a zone, the kernel treats queries of an application and
// queries of the agent as one flow if they have the same source port and the same server.
const zone = 53

// dnsPort is the destination port of the queries that are captured.
const dnsPort = 53
