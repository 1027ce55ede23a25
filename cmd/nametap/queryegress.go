package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/egress"
)

// A vipUse says where connections to the automatic VIPs of an answer have led.
type vipUse struct {
	// Carried reports whether the agent carries connections to VIPs.
	Carried bool `json:"carried"`
	// Hosts are the names that clients connected to, with the last address of each.
	Hosts []egress.HostStatus `json:"hosts,omitempty"`
}

// findEgress adds the use of the VIPs in the answer, if there are any and the agent's status can be read.
func (r *queryResult) findEgress(ctx context.Context, client *statusClient) {
	var status agent.Status
	if r.Rule == nil || !slices.ContainsFunc(r.Answer, hasVIP) || client.get(ctx, "/debug/status", nil, &status) != nil {
		return
	}
	r.Egress = &vipUse{Carried: status.Egress != nil}
	if status.Egress == nil {
		return
	}
	for _, h := range status.Egress.Hosts {
		if strings.EqualFold(h.Host, r.Rule.Host) {
			r.Egress.Hosts = append(r.Egress.Hosts, h)
		}
	}
}

// hasVIP reports whether the data of a record is an automatic VIP.
func hasVIP(record string) bool {
	addr, err := netip.ParseAddr(record[strings.LastIndexByte(record, ' ')+1:])
	return err == nil && slices.ContainsFunc(egress.VIPs(), func(p netip.Prefix) bool { return p.Contains(addr) })
}

// print prints a line for each name; it prints nothing for nil.
func (u *vipUse) print(w io.Writer) {
	if u == nil {
		return
	}
	if !u.Carried {
		fmt.Fprintln(w, "  egress: the agent carries no connections to VIPs: --egress is off")
		return
	}
	if len(u.Hosts) == 0 {
		fmt.Fprintln(w, "  egress: no client has connected yet")
	}
	for _, h := range u.Hosts {
		fmt.Fprintf(w, "  egress: %s leads to %s port %d at %s, %d connections open of %d\n",
			h.VIP.Addr(), h.Name, h.VIP.Port(), h.Address, h.Open, h.Total)
	}
}
