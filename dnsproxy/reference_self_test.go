package dnsproxy

import (
	"net"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// refSpecialZones are the special-use zones that nametap answers (N7).
func refSpecialZones() []string {
	zeros := strings.Repeat("0.", 31) + "ip6.arpa."
	return []string{
		"localhost.", "invalid.", "onion.", "resolver.arpa.", "127.in-addr.arpa.", "0.in-addr.arpa.",
		"255.255.255.255.in-addr.arpa.", "1." + zeros, "0." + zeros,
	}
}

// refSpecial reports whether name is in one of refSpecialZones.
func refSpecial(name string) bool { return refLongest(name, refSpecialZones()) != "" }

// specialHere reports whether name is a special-use name to which no setting gives another
// meaning (N7).
func (r *reference) specialHere(name string) bool {
	meant := slices.DeleteFunc(slices.Clone(r.bypass), func(s string) bool { return !refSpecial(s) })
	return refSpecial(name) && refLongest(name, meant) == ""
}

// special returns the response to a query for a special-use name (N7).
func (r *reference) special(q *refQuery, name string) *dns.Msg {
	resp := r.empty(q)
	any := q.qtype == dns.TypeANY
	hdr := dns.RR_Header{Name: q.name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: r.ttl}
	zone := refLongest(name, refSpecialZones())
	switch {
	case q.qtype == dns.TypeAXFR || q.qtype == dns.TypeIXFR:
		return r.refused(q)
	case zone == "localhost.":
		if q.qtype == dns.TypeA || any {
			resp.Answer = append(resp.Answer, &dns.A{Hdr: hdr, A: []byte{127, 0, 0, 1}})
		}
		if hdr.Rrtype = dns.TypeAAAA; q.qtype == dns.TypeAAAA || any {
			resp.Answer = append(resp.Answer, &dns.AAAA{Hdr: hdr, AAAA: net.IPv6loopback})
		}
	case zone == "invalid." || zone == "onion.":
		resp.Rcode, zone = dns.RcodeNameError, "."
	case name == "1.0.0.127.in-addr.arpa." || name == zone && name[0] == '1' && strings.HasSuffix(name, ".ip6.arpa."):
		if hdr.Rrtype = dns.TypePTR; q.qtype == dns.TypePTR || any {
			resp.Answer = []dns.RR{&dns.PTR{Hdr: hdr, Ptr: "localhost."}}
		}
	case name != zone && zone != "resolver.arpa." && name != "0.127.in-addr.arpa." && name != "0.0.127.in-addr.arpa.":
		resp.Rcode = dns.RcodeNameError
	}
	if name == zone && q.qtype == dns.TypeSOA {
		hdr.Rrtype = dns.TypeSOA
		resp.Answer = []dns.RR{r.soa(hdr)}
	}
	if len(resp.Answer) == 0 {
		hdr.Name, hdr.Rrtype = refTail(q.name, zone), dns.TypeSOA
		resp.Ns = []dns.RR{r.soa(hdr)}
	}
	return resp
}

// refused returns the response to a query for a zone transfer.
func (r *reference) refused(q *refQuery) *dns.Msg {
	resp := r.empty(q)
	resp.Authoritative, resp.Rcode = false, dns.RcodeRefused
	if opt := resp.IsEdns0(); opt != nil {
		opt.Option = []dns.EDNS0{&dns.EDNS0_EDE{ExtraText: errTransfer.Error()}}
	}
	return resp
}

// zone returns the name without search domain and the zone of a local-only name (F12); both
// are empty for other names. The zone is the suffix, followed by the name's search domain
// if it has one.
func (r *reference) zone(name string) (base, zone string) {
	if r.local(name) {
		return name, refLongest(name, r.localOnly)
	}
	for _, domain := range r.search {
		base, ok := strings.CutSuffix(name, "."+domain)
		if base += "."; ok && r.local(base) {
			if zone := refLongest(base, r.localOnly) + domain; len(zone) > len(refLongest(name, r.bypass)) {
				return base, zone
			}
		}
	}
	return "", ""
}

// hasZone reports whether a name is local-only.
func (r *reference) hasZone(name string) bool {
	_, zone := r.zone(name)
	return zone != ""
}

// refTail returns as many last labels of a name, as the client spelled it, as suffix
// has; the name itself for an empty suffix.
func refTail(name, suffix string) string {
	if suffix == "" {
		return name
	}
	labels := dns.SplitDomainName(name)
	if suffix == "." {
		labels = nil
	}
	return strings.Join(labels[len(labels)-min(len(labels), dns.CountLabel(suffix)):], ".") + "."
}

// hasBelow reports whether a name is an ancestor of a mesh name (RFC 8020).
func (r *reference) hasBelow(name string) bool {
	for _, index := range append([]map[string]*refHost{r.hosts, r.wildcards}, r.shortNames[:]...) {
		for own, h := range index {
			if h.wildcard {
				own = "*." + own
			}
			if strings.HasSuffix(own, "."+name) {
				return true
			}
		}
	}
	return r.hasPortBelow(name)
}

// selfAnswer returns the untruncated response to a query that nametap answers without table
// and nameservers, nil if it does not answer the query.
func (r *reference) selfAnswer(q *refQuery) *dns.Msg {
	resp := r.empty(q)
	name := strings.ToLower(q.name)
	if r.specialHere(name) {
		return r.special(q, name)
	}
	f := r.lookup(dns.SplitDomainName(name))
	base, zone := r.zone(name)
	known := f.host != nil || len(r.pointers[name]) > 0
	switch {
	case r.bypassed(name) && zone == "":
		return nil
	case f.denied != "" && (f.host != nil || zone == ""):
		base, zone, known = name, f.denied, false
	}
	switch transfer := q.qtype == dns.TypeAXFR || q.qtype == dns.TypeIXFR; {
	case transfer && (known || zone != ""):
		return r.refused(q)
	case known || zone == "":
		return nil // the name, or the name that it leads to, is forwarded (A4)
	}
	soa := []dns.RR{r.soa(dns.RR_Header{Name: refTail(q.name, zone), Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: r.ttl})}
	switch {
	case name == zone && q.qtype == dns.TypeSOA:
		resp.Answer = soa
	case name == zone || r.hasBelow(base):
		resp.Ns = soa
	default:
		resp.Rcode, resp.Ns = dns.RcodeNameError, soa
	}
	return resp
}
