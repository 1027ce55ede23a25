package dnsproxy

import (
	"cmp"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// A reference answers from the table by the rows N1 to N11 and A1 to A9, with maps of
// strings and with messages as [dns.Msg]. It shares no code with the fast path, which it is
// compared with, and is written to be read, not to be fast.
//
// All its names are in presentation form, lower case and with the trailing dot.
type reference struct {
	domain      string // the cluster domain, "cluster.local."
	namespace   string // the agent's, "shop", or empty
	search      []string
	ttl         uint32
	ednsUDPSize uint16
	// bypass and localOnly are the suffixes of these settings.
	bypass, localOnly []string

	hosts, wildcards map[string]*refHost // by FQDN and by suffix; only hosts that won the name
	// shortNames are the short names by form, in order of precedence: name.namespace,
	// name.namespace.svc and name of hosts whose FQDN is name.namespace.svc.domain.
	shortNames [3]map[string]*refHost
	pointers   map[string][]string // FQDNs by the PTR names of addresses
	foreign    map[string]bool     // the PTR names of addresses that no Service has
}

// A refHost is an entry that can be of use.
type refHost struct {
	key, name  string
	wildcard   bool
	kubernetes bool
	v4, v6     []netip.Addr
	alias      string // the host that it is an alias of, or empty
	headless   bool
	ports      []refPort
	// service is the Service that the host is a part of, for an endpoint or for a port with
	// these labels.
	service   *refHost
	portLabel [2]string
	info      *api.NameTable_NameInfo
}

// newReference returns the reference for a server with cfg, in which namespace,
// domain, TTL and UDP size are set, and a search list.
func newReference(cfg Config, search []string) *reference {
	r := &reference{
		namespace:   strings.ToLower(cfg.Namespace),
		ttl:         uint32(cfg.TTL / time.Second),
		ednsUDPSize: uint16(cfg.EDNSUDPSize),
		bypass:      refNames(cfg.Bypass),
		localOnly:   refNames(cfg.LocalOnly),
	}
	// The domain may have "namespace.svc." or "svc." before it, as in a pod.
	domain, _ := refName(cfg.Domain)
	if rest, ok := strings.CutPrefix(domain, r.namespace+"."); ok && strings.HasPrefix(rest, "svc.") {
		domain = rest
	}
	r.domain = domain
	if rest, ok := strings.CutPrefix(domain, "svc."); ok && rest != "" {
		r.domain = rest
	}
	r.search = refNames(search)
	return r
}

// refNames parses names and leaves out invalid ones.
func refNames(texts []string) []string {
	var names []string
	for _, s := range texts {
		if name, ok := refName(s); ok {
			names = append(names, name)
		}
	}
	return names
}

// refLongest returns the longest of suffixes that name is or is below, or nothing.
func refLongest(name string, suffixes []string) string {
	longest := ""
	for _, suffix := range suffixes {
		if strings.HasSuffix("."+name, "."+suffix) && len(suffix) > len(longest) {
			longest = suffix
		}
	}
	return longest
}

// local reports whether a name is local-only (F12).
func (r *reference) local(name string) bool {
	return refLongest(name, r.localOnly) != "" && !r.bypassed(name)
}

// bypassed reports whether a name is forwarded even if the table has it (F12).
func (r *reference) bypassed(name string) bool {
	suffix := refLongest(name, r.bypass)
	return suffix != "" && len(suffix) >= len(refLongest(name, r.localOnly))
}

// hostPattern is a hostname of letters, digits, hyphens and underscores.
var hostPattern = regexp.MustCompile(`^[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*$`)

// refName parses a name in presentation form.
func refName(s string) (name string, ok bool) { // N10
	s = strings.TrimSuffix(s, ".")
	const longest = 253 // characters, which is 255 bytes on the wire
	return strings.ToLower(s) + ".", len(s) <= longest && hostPattern.MatchString(s)
}

// load adds the entries of a push.
func (r *reference) load(table map[string]*api.NameTable_NameInfo) {
	r.hosts, r.wildcards = map[string]*refHost{}, map[string]*refHost{}
	r.pointers, r.foreign = map[string][]string{}, map[string]bool{}
	for i := range r.shortNames {
		r.shortNames[i] = map[string]*refHost{}
	}
	var hosts []*refHost
	for key, info := range table {
		if h := r.newHost(key, info); h != nil {
			hosts = append(hosts, h)
		}
	}
	// N7: if two entries claim a name the Kubernetes one wins, then the smaller key.
	slices.SortFunc(hosts, func(x, y *refHost) int {
		if x.kubernetes != y.kubernetes {
			if x.kubernetes {
				return -1
			}
			return 1
		}
		return cmp.Compare(x.key, y.key)
	})
	for _, h := range hosts {
		if h.wildcard {
			refClaim(r.wildcards, h.name, h)
		} else {
			refClaim(r.hosts, h.name, h)
		}
	}
	for _, h := range hosts {
		if !h.wildcard && r.hosts[h.name] == h {
			r.loadShortNames(h)
		}
	}
	r.loadPointers()
}

func refClaim(index map[string]*refHost, name string, h *refHost) {
	if index[name] == nil {
		index[name] = h
	}
}

// newHost parses an entry; it returns nil if the entry is not usable.
func (r *reference) newHost(key string, info *api.NameTable_NameInfo) *refHost {
	h := &refHost{key: key, info: info, kubernetes: info.GetRegistry() == "Kubernetes"}
	rest, wildcard := strings.CutPrefix(key, "*.")
	name, ok := refName(rest)
	if !ok || refSpecial(name) || wildcard && len("*."+name) > 254 {
		return nil
	}
	h.name, h.wildcard = name, wildcard
	if zone := r.clusterZone(name); zone != "" && (wildcard || !h.kubernetes) &&
		(info.GetNamespace() == "" || wildcard && name == zone) {
		return nil // N7
	}
	if alias, ok := refName(info.GetAlias()); ok && !refSpecial(alias) && (wildcard || alias != name) {
		h.alias = alias
	}
	v4, v6 := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, ip := range info.GetIps() {
		addr, err := netip.ParseAddr(ip)
		addr = addr.Unmap()
		switch {
		case err != nil || addr.Zone() != "" || addr.IsUnspecified():
		case addr.Is4():
			v4[addr] = true
		default:
			v6[addr] = true
		}
	}
	h.v4 = slices.Collect(maps.Keys(v4))
	h.v6 = slices.Collect(maps.Keys(v6))
	if len(v4)+len(v6) == 0 && h.alias == "" && (wildcard || !h.kubernetes) {
		return nil // N11
	}
	if h.kubernetes && !wildcard && h.alias == "" {
		h.headless = info.GetHeadless()
		h.ports = refPorts(h, info)
	}
	return h
}

// loadShortNames adds the short names of a host. Only Services of the cluster have them
// (N2, N3).
func (r *reference) loadShortNames(h *refHost) {
	short, namespace := h.info.GetShortname(), h.info.GetNamespace()
	qualified, ok := refName(short + "." + namespace)
	if !h.kubernetes || !ok || h.name != qualified+"svc."+r.domain {
		return
	}
	refClaim(r.shortNames[0], qualified, h)
	refClaim(r.shortNames[1], qualified+"svc.", h)
	if strings.EqualFold(namespace, r.namespace) {
		refClaim(r.shortNames[2], strings.ToLower(short)+".", h)
	}
}

// refReverseNames returns the PTR names of an address. An IPv4 address has a second one,
// for its IPv4-mapped IPv6 address.
func refReverseNames(addr netip.Addr) []string {
	var names []string
	for _, s := range []string{addr.String(), "::ffff:" + addr.String()} {
		if a, err := netip.ParseAddr(s); err == nil {
			var labels []string
			for _, b := range slices.Backward(a.AsSlice()) {
				if a.Is4() {
					labels = append(labels, refDecimal(b))
				} else {
					const hex = "0123456789abcdef"
					labels = append(labels, hex[b&15:][:1], hex[b>>4:][:1])
				}
			}
			zone := map[bool]string{true: ".in-addr.arpa.", false: ".ip6.arpa."}[a.Is4()]
			names = append(names, strings.Join(labels, ".")+zone)
		}
	}
	return names
}

func refDecimal(b byte) string {
	return strings.TrimSuffix(netip.AddrFrom4([4]byte{b}).String(), ".0.0.0")
}

// A refFound says how a name is found.
type refFound struct {
	host   *refHost // nil if it is not
	target int      // the number of labels of the autopath target, 0 if the name itself is the host's
	// outside is the name that nameservers are asked for first. A search domain may have made the name from it if doubtful
	// is set: then the host does not answer if nameservers fail.
	outside  string
	doubtful bool
	// denied is a zone of the name if this is nowhere else.
	denied string
	// bypassed says that the name, or the name before its search domain, is of a bypassed host.
	bypassed bool
}

// lookup finds the host that answers a name.
func (r *reference) lookup(labels []string) refFound {
	name := strings.Join(labels, ".") + "."
	if refSpecial(name) || r.bypassed(name) && !r.hasZone(name) {
		return refFound{}
	}
	var direct refFound
	direct.host, direct.bypassed = r.find(labels)
	if r.checkRest(&direct, labels); direct.host != nil && direct.denied == "" {
		return direct
	}
	f := r.autopath(direct, labels, name)
	if f.host == nil && f.denied == "" && !f.bypassed || f.outside == name {
		r.deny(&f, name)
	}
	return f
}

// autopath finds the host that answers a name with a search domain (N5). direct says how the name itself is found.
func (r *reference) autopath(direct refFound, labels []string, name string) refFound {
	first := slices.IndexFunc(r.search, r.ownDomain)
	for i, domain := range r.search {
		base, ok := strings.CutSuffix(name, "."+domain)
		if !ok {
			continue
		}
		found := refFound{target: dns.CountLabel(base)}
		found.host, found.bypassed = r.find(labels[:found.target])
		h := r.claimant(labels[:found.target], base+".")
		own, made := r.ownDomain(domain), refLongest(base+".", []string{"svc." + r.domain}) != ""
		if h == nil && made && !refSpecial(base+".") && !r.bypassed(base+".") {
			direct.denied = domain
		}
		if h != nil && !own && direct.denied != "" && (h.wildcard || h.name == base+".") {
			continue
		}
		if h != nil && own && !h.kubernetes && (i != first || r.denied(name)) {
			continue // a name of the cluster
		}
		if direct.bypassed = direct.bypassed || found.bypassed; found.host == nil {
			continue
		}
		if i != first && !made {
			found.outside = name
		}
		return found
	}
	if direct.bypassed {
		direct.host, direct.denied = nil, ""
	}
	return direct
}

// ownDomain reports whether a domain is one of the cluster's search domains.
func (r *reference) ownDomain(domain string) bool {
	own := []string{"svc." + r.domain, r.domain}
	if r.namespace != "" {
		own = append(own, r.namespace+".svc."+r.domain)
	}
	return slices.Contains(own, domain)
}

// clusterZone returns the zone of the cluster that a name is in, or nothing (N7).
func (r *reference) clusterZone(name string) string {
	return cmp.Or(refLongest(name, []string{r.domain}), refLongest(name, []string{"svc."}))
}

// checkRest completes f if it is a wildcard's: labels are a name below the wildcard (N4).
func (r *reference) checkRest(f *refFound, labels []string) {
	if f.host == nil || !f.host.wildcard {
		return
	}
	name, domain := strings.Join(labels, ".")+".", f.host.name
	for _, searched := range r.search {
		if strings.HasSuffix(name, "."+searched) && dns.IsSubDomain(domain, searched) {
			domain, f.doubtful = searched, true
		}
	}
	labels = labels[:len(labels)-dns.CountLabel(domain)]
	rest := strings.Join(labels, ".") + "."
	if len(labels) < 2 || refSpecial(rest) {
		return
	}
	of := r.claimant(labels, rest)
	if of != nil && !of.wildcard && of.name != rest { // a short name of a Service
		at := slices.Index(r.search, domain)
		if at < 0 || len(of.v4)+len(of.v6) > 0 && slices.ContainsFunc(r.search[:at], r.ownDomain) {
			return
		}
	}
	f.outside = rest
	if of != nil || refLongest(rest, []string{"svc." + r.domain}) != "" {
		f.denied, f.outside = domain, ""
	} else if _, attribute := r.attributed(rest); attribute && f.doubtful {
		f.denied, f.outside = domain, name
	}
}

// deny sets denied if a name that the table does not have is nowhere else (N9).
func (r *reference) deny(f *refFound, name string) {
	if r.denied(name) {
		*f = refFound{denied: r.domain}
	} else if of, found := r.attributed(name); found && f.host == nil {
		if f.denied = refOwner(name); of.outside != "" {
			f.outside = name
		}
	}
}

// refOwner returns the name that a name is an attribute of.
func refOwner(name string) string {
	for strings.HasPrefix(name, "_") {
		_, name, _ = strings.Cut(name, ".")
	}
	return name
}

// attributed finds the Service that a name is an attribute of, if all names below the Service are known.
func (r *reference) attributed(name string) (of refFound, found bool) {
	if owner := refOwner(name); owner != name && owner != "" {
		of = r.lookup(dns.SplitDomainName(owner))
	}
	return of, of.host != nil && of.denied == "" && r.whole("x."+of.host.name)
}

// denied reports whether a name of the cluster domain that the table does not have is nowhere else (N9).
func (r *reference) denied(name string) bool {
	return refLongest(name, []string{r.domain}) != "" && (r.whole(name) || r.hasBelow(name))
}

// whole reports whether all names below a Service that a name is below are known.
func (r *reference) whole(name string) bool {
	for service, h := range r.hosts {
		if h.kubernetes && (h.headless || len(h.ports) > 0) && service != name && dns.IsSubDomain(service, name) &&
			strings.HasSuffix(service, ".svc."+r.domain) {
			return true
		}
	}
	return false
}

// shortName reports whether a name of the host is neither its FQDN nor below its wildcard.
func (h *refHost) shortName(labels []string) bool {
	name := strings.Join(labels, ".") + "."
	return !h.wildcard && name != h.name
}

// find finds a host by a name without search domain, unless the name or the host is
// bypassed.
func (r *reference) find(labels []string) (h *refHost, bypassed bool) {
	name := strings.Join(labels, ".") + "."
	h = r.claimant(labels, name)
	if h == nil || refSpecial(name) {
		return nil, false
	}
	if r.bypassed(name) || r.bypassed(h.name) && !h.wildcard || r.bypassed(h.alias) {
		return nil, true
	}
	return h, false
}

// claimant returns the host that has a name.
func (r *reference) claimant(labels []string, name string) *refHost {
	zone, full := r.clusterZone(name), r.hosts[name]
	if full != nil && (full.kubernetes || zone == r.domain) { // N1
		return full
	}
	if h := r.part(labels, func(name string) *refHost { return r.hosts[name] }); h != nil {
		return h
	}
	short := func(name string) *refHost {
		for _, form := range r.shortNames { // N2
			if h := form[name]; h != nil {
				return h
			}
		}
		return nil
	}
	if zone != r.domain {
		if h := short(name); h != nil {
			return h
		}
		if h := r.part(labels, func(name string) *refHost {
			if h := r.hosts[name]; h != nil && h.kubernetes {
				return nil
			}
			return short(name)
		}); h != nil {
			return h
		}
		if pod := short(strings.Join(labels[min(1, len(labels)):], ".") + "."); pod != nil && pod.headless {
			return nil // N7
		}
		if full != nil {
			return full
		}
	}
	for i := 1; i < len(labels); i++ { // N4
		suffix := strings.Join(labels[i:], ".") + "."
		if h := r.wildcards[suffix]; h != nil && (zone == "" || zone == r.clusterZone(suffix)) {
			return h
		}
	}
	return nil
}

// aliased returns the host, a port's or an endpoint's included, that a host is an alias of; nil if the
// table does not have it, or as an alias only.
func (r *reference) aliased(alias string) *refHost {
	h := r.claimant(dns.SplitDomainName(alias), alias)
	if h == nil || h.alias != "" || h.service == nil && h.shortName(dns.SplitDomainName(alias)) ||
		h.service != nil && h.name != alias {
		return nil
	}
	return h
}

// empty returns the response to a query without records.
func (r *reference) empty(q *refQuery) *dns.Msg {
	resp := &dns.Msg{}
	resp.Id, resp.Response, resp.Authoritative, resp.RecursionAvailable = q.id, true, true, true // A1
	resp.RecursionDesired, resp.CheckingDisabled = q.flags&0x100 != 0, q.flags&0x10 != 0
	resp.Question = []dns.Question{{Name: q.name, Qtype: q.qtype, Qclass: dns.ClassINET}}
	if q.edns { // A8
		opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT, Class: r.ednsUDPSize}}
		if q.do {
			opt.Hdr.Ttl = 0x8000
		}
		resp.Extra = []dns.RR{opt}
	}
	return resp
}

// answer returns the response of the table to a query, of any length, nil if the table does not answer it. If outside
// is not empty, it is the response only if nameservers do not have this name.
func (r *reference) answer(q *refQuery) (resp *dns.Msg, outside string) {
	name := strings.ToLower(q.name)
	labels := dns.SplitDomainName(name)
	if q.qtype == dns.TypeAXFR || q.qtype == dns.TypeIXFR || r.specialHere(name) || r.bypassed(name) && !r.hasZone(name) {
		return nil, ""
	}
	if len(r.pointers[name]) > 0 { // N8
		if r.foreign[name] && !r.hasZone(name) {
			outside = name
		}
		return r.pointer(q), outside
	}
	f := r.lookup(labels)
	if f.denied != "" && f.outside != "" && !r.hasZone(name) {
		return r.selfAnswer(q), f.outside
	}
	if f.host == nil || f.denied != "" {
		return nil, ""
	}
	resp, served := r.mesh(q, &f)
	if !served {
		return nil, ""
	}
	if f.outside != "" && !r.hasZone(name) && !r.local(f.outside) {
		if f.doubtful {
			resp = nil // there are no nameservers
		}
		return resp, f.outside
	}
	return resp, ""
}

// header returns the header of a record of the table.
func (r *reference) header(owner string, rrtype uint16) dns.RR_Header {
	return dns.RR_Header{Name: owner, Rrtype: rrtype, Class: dns.ClassINET, Ttl: r.ttl}
}

// pointer returns the response to a query for the PTR name of an address (N8).
func (r *reference) pointer(q *refQuery) *dns.Msg {
	resp, name := r.empty(q), strings.ToLower(q.name)
	if q.qtype == dns.TypePTR || q.qtype == dns.TypeANY {
		for _, host := range r.pointers[name] {
			resp.Answer = append(resp.Answer, &dns.PTR{Hdr: r.header(q.name, dns.TypePTR), Ptr: host})
		}
		return resp
	}
	_, zone := r.zone(name)
	resp.Ns = []dns.RR{r.soa(r.header(refTail(q.name, zone), dns.TypeSOA))}
	return resp
}

// mesh returns the response to a query for the name of a host. It reports whether the table has all records of the
// type.
func (r *reference) mesh(q *refQuery, f *refFound) (resp *dns.Msg, served bool) {
	h, target, owner := f.host, f.target, q.name
	labels := dns.SplitDomainName(strings.ToLower(q.name))
	resp = r.empty(q)
	expanded := target > 0 || h.shortName(labels) // N2, N5, N6
	if target == 0 {
		target = len(labels)
	}
	if expanded {
		owner = strings.Join(dns.SplitDomainName(q.name)[:target], ".") + "."
		if h.shortName(labels[:target]) {
			owner = h.name
		}
		resp.Answer = append(resp.Answer, &dns.CNAME{Hdr: r.header(q.name, dns.TypeCNAME), Target: owner})
		if q.qtype == dns.TypeCNAME {
			return resp, true
		}
	}
	alias := h.alias // D9
	if alias == strings.ToLower(q.name) || alias == strings.ToLower(owner) {
		alias = "" // a loop
	}
	if alias != "" {
		resp.Answer = append(resp.Answer, &dns.CNAME{Hdr: r.header(owner, dns.TypeCNAME), Target: alias})
		owner = alias
	}
	records := h // the host whose records answer
	if alias != "" {
		if of := r.aliased(alias); of != nil {
			records = of
		}
	}
	switch served = records.alias == "" && records.kubernetes; q.qtype {
	case dns.TypeA, dns.TypeAAAA, dns.TypeANY, dns.TypeHTTPS, dns.TypeSVCB:
		served = served || h.alias == "" || len(h.v4)+len(h.v6) > 0
	case dns.TypeCNAME: // A4
		served = served || alias != ""
	}
	served = served || r.local(strings.ToLower(owner))
	if r.answerServices(resp, r.services(records, q.qtype), owner) {
		return resp, served
	}
	var addresses []dns.RR
	if q.qtype == dns.TypeA || q.qtype == dns.TypeANY { // A5
		for _, addr := range h.v4 {
			addresses = append(addresses, &dns.A{Hdr: r.header(owner, dns.TypeA), A: addr.AsSlice()})
		}
	}
	if q.qtype == dns.TypeAAAA || q.qtype == dns.TypeANY {
		for _, addr := range h.v6 {
			addresses = append(addresses, &dns.AAAA{Hdr: r.header(owner, dns.TypeAAAA), AAAA: addr.AsSlice()})
		}
	}
	resp.Answer = append(resp.Answer, addresses...)
	if len(addresses) == 0 && (alias == "" || q.qtype != dns.TypeCNAME) { // A2, A3
		if expanded { // N2, N5
			resp.Answer, owner = nil, q.name
		} else if name := strings.ToLower(owner); r.local(name) {
			owner = refTail(owner, refLongest(name, r.localOnly))
		}
		resp.Ns = []dns.RR{r.soa(r.header(owner, dns.TypeSOA))}
	}
	return resp, served
}

func (r *reference) soa(hdr dns.RR_Header) *dns.SOA {
	return &dns.SOA{
		Hdr: hdr, Ns: "ns.dns." + r.domain, Mbox: "hostmaster." + r.domain,
		Serial: 1, Refresh: 7200, Retry: 1800, Expire: 86400, Minttl: r.ttl,
	}
}
