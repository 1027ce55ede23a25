package dnsproxy

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// part returns the endpoint or the port of a Service that has a name, given how to find the
// Service.
func (r *reference) part(labels []string, find func(name string) *refHost) *refHost {
	from := func(i int) *refHost { return find(strings.Join(labels[min(i, len(labels)):], ".") + ".") }
	if h := r.endpoint(labels, from(1)); h != nil {
		return h
	}
	return refPortOf(labels, from(2))
}

// refDashed returns the label of an endpoint with an address (D21).
func refDashed(addr netip.Addr) string {
	label := strings.NewReplacer(".", "-", ":", "-").Replace(addr.String())
	if strings.HasSuffix(label, "-") {
		label += "0"
	}
	return label
}

// endpoint returns the endpoint of a headless Service, which may be nil, that has the first of
// labels as its own: a host with one address and the FQDN of the endpoint (D21).
func (r *reference) endpoint(labels []string, service *refHost) *refHost {
	if service == nil || !service.headless || len(labels) < 2 {
		return nil
	}
	name, ok := refName(labels[0] + "." + service.name)
	if !ok {
		return nil
	}
	for _, addr := range slices.Concat(service.v4, service.v6) {
		if refDashed(addr) == labels[0] {
			one := &refHost{key: service.key, name: name, kubernetes: true, info: service.info, service: service}
			if one.v4 = []netip.Addr{addr}; addr.Is6() {
				one.v4, one.v6 = nil, one.v4
			}
			return one
		}
	}
	return nil
}

// pod returns the host of a pod of a headless Service that has an address.
func (r *reference) pod(service *refHost, addr netip.Addr) *refHost {
	for _, h := range r.hosts {
		if slices.Contains(r.servicesOfPod(h), service) && slices.Contains(slices.Concat(h.v4, h.v6), addr) {
			return h
		}
	}
	return nil
}

// servicesOfPod returns the headless Services that a host is a pod of. Outside of the cluster domain
// there may be the name of a cluster between the pod and the Service.
func (r *reference) servicesOfPod(h *refHost) (services []*refHost) {
	_, near, _ := strings.Cut(h.name, ".")
	_, far, _ := strings.Cut(near, ".")
	if r.inCluster(h) {
		far = ""
	}
	for _, name := range []string{near, far} {
		if service := r.hosts[name]; service != nil && service.headless && h.kubernetes && !h.headless && h.alias == "" && !h.wildcard {
			services = append(services, service)
		}
	}
	return services
}

// inCluster reports whether a host is below the cluster domain.
func (r *reference) inCluster(h *refHost) bool { return strings.HasSuffix(h.name, "."+r.domain) }

// loadPointers adds the names of all addresses (N8, D21). Bypassed hosts have none.
func (r *reference) loadPointers() {
	owners, services := map[netip.Addr][]*refHost{}, map[netip.Addr]bool{}
	for _, h := range r.hosts {
		for _, addr := range slices.Concat(h.v4, h.v6) {
			if h.alias == "" && !r.bypassed(h.name) { // D9, F12
				owners[addr] = append(owners[addr], h)
				services[addr] = services[addr] || h.kubernetes
			}
		}
	}
	for addr, hosts := range owners {
		var names []string
		endpoints, named := map[bool][]string{}, map[bool]bool{} // inside and outside of the cluster domain
		for _, h := range hosts {
			side := r.inCluster(h)
			switch pod := r.pod(h, addr); {
			case !h.kubernetes && services[addr]:
			case !h.headless:
				names = append(names, h.name)
			case pod != nil && slices.ContainsFunc(hosts, func(p *refHost) bool { return slices.Contains(r.servicesOfPod(p), h) }):
				named[side] = true
			default:
				if name, ok := refName(refDashed(addr) + "." + h.name); ok {
					endpoints[side] = append(endpoints[side], name)
				}
			}
		}
		for side, found := range endpoints {
			if !named[side] {
				names = append(names, found...)
			}
		}
		slices.Sort(names)
		for _, name := range refReverseNames(addr) {
			r.pointers[name], r.foreign[name] = names, !services[addr]
		}
	}
}

// A refPort is a port of a Service.
type refPort struct {
	name, protocol string // in lower case
	number         uint16
	addrs          []netip.Addr // the Service's addresses that have it
}

// refPorts returns the ports of a host that are valid.
func refPorts(h *refHost, info *api.NameTable_NameInfo) []refPort {
	var ports []refPort
	for _, in := range info.GetPorts() {
		p := refPort{name: strings.ToLower(in.GetName()), number: uint16(in.GetNumber())}
		p.protocol = strings.ToLower(cmp.Or(in.GetProtocol(), "TCP"))
		if _, ok := refName(p.name); p.name != "" && (!ok || strings.Contains(p.name, ".") || len(p.name) > 62) {
			continue
		}
		if in.GetNumber() == 0 || in.GetNumber() > 65535 || !slices.Contains([]string{"tcp", "udp", "sctp"}, p.protocol) {
			continue
		}
		for _, addr := range slices.Concat(h.v4, h.v6) {
			if len(in.GetIps()) == 0 || slices.ContainsFunc(in.GetIps(), func(ip string) bool {
				a, err := netip.ParseAddr(ip)
				return err == nil && a.Unmap() == addr
			}) {
				p.addrs = append(p.addrs, addr)
			}
		}
		if (len(in.GetIps()) == 0 || len(p.addrs) > 0) && !slices.ContainsFunc(ports, func(q refPort) bool {
			return q.name == p.name && q.number == p.number && q.protocol == p.protocol
		}) {
			ports = append(ports, p)
		}
	}
	return ports
}

// refPortOf returns the port of a Service, which may be nil, that has the first two of labels.
func refPortOf(labels []string, service *refHost) *refHost {
	if service == nil || len(labels) < 3 {
		return nil
	}
	h := &refHost{key: service.key, kubernetes: true, info: service.info, service: service, portLabel: [2]string(labels[:2])}
	h.v4, h.v6 = service.v4, service.v6
	name, ok := refName(labels[0] + "." + labels[1] + "." + service.name)
	if h.name = name; !ok || !slices.ContainsFunc(service.ports, h.named) {
		return nil
	}
	return h
}

// named reports whether a host is the port p of its Service.
func (h *refHost) named(p refPort) bool {
	return p.name != "" && h.portLabel == [2]string{"_" + p.name, "_" + p.protocol}
}

// hasPortBelow reports whether a name is _protocol before a name of a Service with named ports of
// that protocol.
func (r *reference) hasPortBelow(name string) bool {
	protocol, parent, _ := strings.Cut(name, ".")
	h := r.claimant(dns.SplitDomainName(parent), parent)
	return h != nil && h.service == nil && slices.ContainsFunc(h.ports, func(p refPort) bool {
		return p.name != "" && protocol == "_"+p.protocol
	})
}

// A refService is what an SRV record says.
type refService struct {
	port   uint16
	target string
	addrs  []netip.Addr
}

// services returns the SRV records for a query of a type, with duplicates.
func (r *reference) services(h *refHost, qtype uint16) []refService { // D22
	isPort := h.portLabel[0] != ""
	if qtype != dns.TypeSRV {
		return nil
	}
	service := h
	if of := r.servicesOfPod(h); h.service != nil {
		service = h.service
	} else if len(h.ports) == 0 && len(of) > 0 {
		service = of[0]
	}
	var all []refService
	own := slices.Concat(h.v4, h.v6)
	if isPort {
		own = slices.Concat(service.v4, service.v6)
	}
	for _, p := range service.ports {
		switch {
		case isPort && !h.named(p):
		case service.headless && (service == h || isPort):
			for _, addr := range p.addrs {
				one := refService{p.number, refDashed(addr) + "." + service.name, []netip.Addr{addr}}
				if pod := r.pod(service, addr); pod != nil {
					one.target, one.addrs = pod.name, slices.Concat(pod.v4, pod.v6)
				}
				all = append(all, one)
			}
		case slices.ContainsFunc(own, func(a netip.Addr) bool { return slices.Contains(p.addrs, a) }):
			one := refService{p.number, h.name, own}
			if isPort {
				one.target = service.name
			}
			for range own {
				all = append(all, one)
			}
		}
	}
	return all
}

// answerServices adds SRV records to a response, and all addresses of their targets. It reports
// false if there are none.
func (r *reference) answerServices(resp *dns.Msg, all []refService, owner string) bool {
	var targets []string
	for i, s := range all {
		if slices.ContainsFunc(all[:i], func(earlier refService) bool { return earlier.port == s.port && earlier.target == s.target }) {
			continue
		}
		if _, ok := refName(s.target); !ok {
			continue
		}
		resp.Answer = append(resp.Answer, &dns.SRV{
			Hdr: r.header(owner, dns.TypeSRV), Weight: uint16(max(100/len(all), 1)), Port: s.port, Target: s.target,
		})
		if slices.Contains(targets, s.target) {
			continue
		}
		targets = append(targets, s.target)
		for _, addr := range s.addrs {
			hdr := r.header(s.target, dns.TypeA)
			if addr.Is6() {
				hdr.Rrtype = dns.TypeAAAA
				resp.Extra = append(resp.Extra, &dns.AAAA{Hdr: hdr, AAAA: addr.AsSlice()})
			} else {
				resp.Extra = append(resp.Extra, &dns.A{Hdr: hdr, A: addr.AsSlice()})
			}
		}
	}
	return len(targets) > 0
}

// isServices reports whether a response has SRV records.
func isServices(resp *dns.Msg) bool {
	return len(resp.Answer) > 0 && resp.Answer[len(resp.Answer)-1].Header().Rrtype == dns.TypeSRV
}

// compareServices compares a response with SRV records with the untruncated one. The records come
// in any order, so it is not known which of them fit.
func compareServices(packet []byte, q *refQuery, want *dns.Msg, limit int) error {
	got := new(dns.Msg)
	if err := got.Unpack(packet); err != nil {
		return err
	}
	hdr := want.MsgHdr
	left := refMessageLen(q, want.Answer...) > limit
	hdr.Truncated = left && limit < dns.MaxMsgSize
	switch {
	case len(packet) > limit:
		return fmt.Errorf("%d bytes are too many", len(packet))
	case got.MsgHdr != hdr:
		return fmt.Errorf("header %+v, want %+v", got.MsgHdr, hdr)
	case !bytes.HasPrefix(packet[12:], q.question) || len(got.Ns) > 0 || (got.IsEdns0() == nil) == q.edns:
		return fmt.Errorf("question, authority section or OPT record:\n%v", got)
	}
	longest, err := missing(got.Answer, want.Answer)
	if err != nil || longest == 0 == left || left && len(packet)+longest <= limit {
		return fmt.Errorf("%w: %d bytes are missing", err, longest)
	}
	longest, err = missing(withoutOPT(got.Extra), withoutOPT(want.Extra))
	if left {
		longest = 0
	}
	// A target's addresses are complete or left out.
	for _, rr := range withoutOPT(want.Extra) {
		ofTarget := func(other dns.RR) bool { return other.Header().Name == rr.Header().Name }
		n := len(slices.DeleteFunc(slices.Clone(want.Extra), func(rr dns.RR) bool { return !ofTarget(rr) }))
		has := len(slices.DeleteFunc(slices.Clone(got.Extra), func(rr dns.RR) bool { return !ofTarget(rr) }))
		if has != 0 && has != n || has > 0 && left {
			return fmt.Errorf("%d of %d addresses of %s", has, n, rr.Header().Name)
		}
		if has == 0 {
			longest = max(longest, n*28)
		}
	}
	if err == nil && longest > 0 && !left && len(packet)+longest <= limit && len(packet) < 1<<14 {
		return fmt.Errorf("additional records of %d bytes are missing", longest)
	}
	return err
}

func withoutOPT(rrs []dns.RR) []dns.RR {
	return slices.DeleteFunc(slices.Clone(rrs), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
}

// missing returns the length of the longest record that is in want and not in got, and an error
// if a record of got is not in want.
func missing(got, want []dns.RR) (longest int, err error) {
	left := map[string]int{}
	for _, rr := range want {
		left[recordKey(rr)]++
	}
	for _, rr := range got {
		if left[recordKey(rr)]--; left[recordKey(rr)] < 0 {
			return 0, fmt.Errorf("%v is too many", rr)
		}
	}
	for _, rr := range want {
		if left[recordKey(rr)] > 0 {
			longest = max(longest, refRecordLen(rr))
		}
	}
	return longest, nil
}
