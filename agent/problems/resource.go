package problems

import "fmt"

// resourceChecks returns the checks for resources that can run out.
func resourceChecks() []check {
	return []check{
		{code: ConntrackFull, title: "connection tracking has room", find: conntrackFull},
		{code: Descriptors, title: "the agent has free descriptors", find: descriptors},
		{code: Memory, title: "the agent has free memory", find: memory},
	}
}

func conntrackFull(r *Readings) []Problem { return Conntrack(r.Agent.Conntrack) }

// Conntrack returns a problem if connection tracking is full: at most 1 % of its entries are free.
func Conntrack(table Resource) []Problem {
	if table.full(100, 0) {
		return []Problem{{
			Code: ConntrackFull, Severity: Severe, What: "the connection tracking of the kernel is full",
			Evidence: fmt.Sprintf("it has %d entries, and net.netfilter.nf_conntrack_max is %d", table.Used, table.Limit), Effect: "when no entry is free, the kernel drops new flows, also the flows of DNS queries",
			Mend: fmt.Sprintf("raise net.netfilter.nf_conntrack_max: sysctl -w net.netfilter.nf_conntrack_max=%d; conntrack -L shows what opens so many flows", 2*table.Limit), Rows: []string{"K21"},
		}}
	}
	return nil
}

func descriptors(r *Readings) []Problem {
	if files := r.Agent.Descriptors; files.full(50, 4) {
		return []Problem{{
			Severity: Severe, What: "the agent has no free descriptors",
			Evidence: fmt.Sprintf("%d of at most %d are open", files.Used, files.Limit), Effect: "when none is free, queries over TCP and queries that need a new socket to a nameserver fail",
			Mend: "raise LimitNOFILE= of nametap.service", Rows: []string{"R3"},
		}}
	}
	return nil
}

func memory(r *Readings) []Problem {
	if bytes := r.Agent.Memory; bytes.full(20, 0) {
		return []Problem{{
			Severity: Minor, What: "the memory of the agent is nearly at its limit",
			Evidence: fmt.Sprintf("%d of %d MiB, without what the kernel can free", bytes.Used>>20, bytes.Limit>>20), Effect: "none yet; at the limit the kernel kills the agent",
			Mend: "raise the limit (MemoryMax= of nametap.service, resources.limits.memory of the container), or lower --cache-size", Rows: []string{"R15"},
		}}
	}
	return nil
}
