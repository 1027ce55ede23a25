package iptables

import (
	"fmt"
	"slices"
	"strings"
)

// istioPrefix begins the names of chains of istio-iptables and istio-cni.
const istioPrefix = "ISTIO_"

// istioAdvice says what to do about Istio's rules beside those of nametap.
const istioAdvice = "the rules of nametap come first, so nametap answers; use only one of the two: set ISTIO_META_DNS_CAPTURE to \"false\" for Istio's agent, or run no nametap in this pod"

// istio describes the saved rules of Istio for port 53, table by table.
func (s saved) istio() []string {
	var found []string
	for _, name := range tableNames() {
		chains := make(map[string]bool)
		t := s[name]
		if t == nil {
			continue
		}
		for _, r := range t.rules {
			ws := words(r.spec)
			i := slices.Index(ws, "--dport")
			if i < 0 || i+1 == len(ws) || ws[i+1] != "53" || strings.HasPrefix(r.chain, ownPrefix) {
				continue
			}
			istio := strings.HasPrefix(r.chain, istioPrefix) || strings.HasPrefix(r.target, istioPrefix) ||
				r.target == "CT" && slices.Contains(ws, "--zone") // before its chains in raw had names
			if istio {
				chains[r.chain] = true
			}
		}
		for _, chain := range sortedKeys(chains) {
			found = append(found, fmt.Sprintf("Istio's rules capture port 53 too: table %s, chain %s", name, chain))
		}
	}
	return found
}

func sortedKeys(set map[string]bool) []string {
	var keys []string
	for key := range set {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// checkOthers reports whether other programs capture port 53 too.
func checkOthers(sides ...*side) []Finding {
	var findings []Finding
	for _, s := range sides {
		for _, f := range families() {
			if found := s.saved[f].istio(); len(found) > 0 {
				findings = append(findings, Finding{What: "no other capture of DNS over " + f.String(),
					Detail: string(s.backend) + ": " + strings.Join(found, "; "), Advice: istioAdvice})
			}
		}
	}
	return findings
}
