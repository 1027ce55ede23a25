package iptables

// The names of nametap's chains.
const (
	ownPrefix       = "NAMETAP_"
	outputChain     = ownPrefix + "OUTPUT"
	preroutingChain = ownPrefix + "PREROUTING"
	inputChain      = ownPrefix + "INPUT"
	// tableMark is an empty chain that marks a table that nametap has made. It is installed with the rules. Remove
	// deletes a marked table if no other program uses it. Only nft tables can be deleted, so only they are marked.
	tableMark = ownPrefix + "MADE_TABLE"
)

// tableNames returns the tables that nametap uses, in the order in which they are changed.
func tableNames() []string { return []string{filterTable, "nat", "raw"} }

// filterTable is the table of firewalls.
const filterTable = "filter"

// dnsPort is the destination port of the queries that are captured.
const dnsPort = 53
