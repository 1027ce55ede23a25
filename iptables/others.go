package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

const (
	// istioPrefix begins the names of chains of istio-iptables and istio-cni.
	istioPrefix = "ISTIO_"
	// ztunnelMark is the mark of packets of ztunnel in a pod of Istio's ambient mode. Only rules of istio-cni match
	// this mark: istio-iptables recognises ztunnel's packets by their owner.
	ztunnelMark = "0x539/0xfff"
	// ambientTable is the table of istio-cni, of family inet, if istio-cni uses nft directly instead of iptables.
	ambientTable = "istio-ambient-nat"
	// nfprotoInet is the kernel's number of the family inet.
	nfprotoInet = 1
)

// The advice if Istio has rules besides nametap's.
const (
	istioAdvice = "the rules of nametap come first, so nametap answers; use only one of the two: set ISTIO_META_DNS_CAPTURE to \"false\" for Istio's agent, or run no nametap in this pod"

	ambientSwitch       = "start the pod again with the annotation ambient.istio.io/dns-capture: \"false\", which switches off the DNS capture of ztunnel for this pod"
	ambientAdvice       = "the rules of nametap come first, and its own queries to nameservers do not pass the rules for ztunnel, so nametap answers; use only one of the two: " + ambientSwitch
	nativeAmbientAdvice = "these rules send the agent's own queries to ztunnel, or back to the agent: " + ambientSwitch
)

// istioRules describes the saved rules of Istio for port 53, table by table. ambient is true if any of them are for ztunnel.
func istioRules(s saved) (found []string, ambient bool) {
	for _, name := range tableNames() {
		chains, ztunnel := make(map[string]bool), false
		for _, r := range s[name].rules {
			if istio, marked := isIstio(r); istio {
				chains[r.chain] = true
				ztunnel = ztunnel || marked
			}
		}
		what := "Istio's rules capture port 53 too"
		if ztunnel {
			what = "the rules for ztunnel (Istio's ambient mode) capture port 53 too"
		}
		for _, chain := range slices.Sorted(maps.Keys(chains)) {
			found = append(found, fmt.Sprintf("%s: table %s, chain %s", what, name, chain))
		}
		ambient = ambient || ztunnel
	}
	return found, ambient
}

// isIstio reports whether a rule is a rule of Istio for port 53. ztunnel is true if it also matches the mark of
// ztunnel's packets.
func isIstio(r savedRule) (istio, ztunnel bool) {
	ws := words(r.spec)
	if valueOf(ws, "--dport") != "53" || strings.HasPrefix(r.chain, ownPrefix) {
		return false, false
	}
	// Older versions of Istio have rules with the target CT in the built-in chains of table raw.
	istio = strings.HasPrefix(r.chain, istioPrefix) || strings.HasPrefix(r.target, istioPrefix) ||
		r.target == "CT" && slices.Contains(ws, "--zone")
	return istio, istio && slices.Contains(ws, ztunnelMark)
}

// nativeAmbient describes the nft rules of istio-cni for ztunnel, which the tools of iptables do not show. It
// returns "" if there are none.
func nativeAmbient() string {
	if askNFTTable(nfprotoInet, ambientTable) != nil {
		return ""
	}
	return "the rules for ztunnel (Istio's ambient mode) may capture port 53 too: nft table inet " + ambientTable
}

// otherRules describes the rules of Istio for port 53 in both backends.
func otherRules(f family.Family, sides ...*side) []string {
	var found []string
	for _, s := range sides {
		rules, _ := istioRules(s.saved[f])
		found = append(found, rules...)
	}
	if native := nativeAmbient(); native != "" {
		found = append(found, native)
	}
	return found
}
