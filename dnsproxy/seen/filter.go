package seen

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Filter says which queries a reader wants. The zero Filter selects all.
type Filter struct {
	noteworthy bool      // only noteworthy queries
	failures   bool      // only queries of the kind Failure
	denied     bool      // only queries for names that the guard denies
	name       wire.Name // this name and all names below it
	qtype      *uint16
	rcode      *uint16
	source     string
	server     string        // the address of a nameserver, perhaps with its port
	minTook    time.Duration // queries that took at least this time; 0 for all

	// The client. At most one of addr, uid and unit is set. port may be set if addr is.
	addr netip.Prefix
	port uint16
	uid  *uint32
	unit string
	// wantOwner is true if the reader wants to know the owner of the client's socket.
	wantOwner bool
}

// The parameters of a filter.
const (
	ParamFailed = "failed" // noteworthy queries only
	ParamDenied = "denied" // names that the guard denies
	ParamName   = "name"   // a name and all names below it
	ParamType   = "type"
	ParamRcode  = "rcode"
	ParamSource = "source"
	ParamServer = "server" // a nameserver that answered, or failed to answer
	ParamSlow   = "slow"   // queries that took at least this time
	ParamClient = "client" // an address, a prefix, a uid, or a unit
	ParamWho    = "who"    // selects nothing: it asks for the owner of each client's socket
)

// probe is the source of answers to questions about the server, such as id.server. The agent itself asks such
// questions twice a second, to see whether it is reached.
const probe = "probe"

// sources are the sources of answers, as metrics name them.
func sources() []string {
	return []string{"table", "cache", "stale", "cached_failure", "upstream", "self", probe}
}

// ParseFilter returns the filter with these parameters. A parameter that is missing selects all queries. An error
// says which parameter is wrong.
func ParseFilter(params url.Values) (f *Filter, err error) {
	f = &Filter{noteworthy: params.Get(ParamFailed) != "", source: params.Get(ParamSource),
		denied: params.Get(ParamDenied) != "", wantOwner: params.Get(ParamWho) != "" || params.Get(ParamDenied) != ""}
	if text := params.Get(ParamName); text != "" {
		if f.name, err = wire.ParseName(text); err != nil {
			return nil, err
		}
	}
	if text := params.Get(ParamType); text != "" {
		qtype, err := wire.ParseType(text)
		if err != nil {
			return nil, err
		}
		f.qtype = &qtype
	}
	if text := params.Get(ParamRcode); text != "" {
		if f.rcode, err = parseRcode(text); err != nil {
			return nil, err
		}
	}
	if text := params.Get(ParamServer); text != "" {
		addr, port, ok := parseAddr(bareServer(text))
		switch f.server = addr.String(); {
		case !ok:
			return nil, fmt.Errorf("server %q: want the address of a nameserver such as 10.96.0.10 or 10.96.0.10:5353", text)
		case port != 0 && port != 53 && port != 853: // names of nameservers do not have these
			f.server = netip.AddrPortFrom(addr, port).String()
		}
	}
	if f.source != "" && !slices.Contains(sources(), f.source) {
		return nil, fmt.Errorf("source %q: want one of %s", f.source, strings.Join(sources(), ", "))
	}
	if text := params.Get(ParamSlow); text != "" {
		if f.minTook, err = time.ParseDuration(text); err != nil || f.minTook <= 0 {
			return nil, fmt.Errorf("slow %q: want a time such as 200ms", text)
		}
	}
	f.setClient(params.Get(ParamClient))
	return f, nil
}

// Failures returns the Filter that selects the queries of the kind [Failure].
func Failures() *Filter { return &Filter{failures: true} }

// All returns the Filter that selects all queries, and asks for the owners of all clients' sockets.
func All() *Filter { return &Filter{wantOwner: true} }

// ordinary reports whether the filter may select an ordinary query.
func (f *Filter) ordinary() bool { return !f.noteworthy && !f.failures }

func parseRcode(text string) (*uint16, error) {
	upper := strings.ToUpper(text)
	dropped := uint16(Dropped)
	if upper == droppedName {
		return &dropped, nil
	}
	if code, known := dns.StringToRcode[upper]; known {
		small := uint16(code) //nolint:gosec // twelve bits
		return &small, nil
	}
	const bits = 12
	if code, err := strconv.ParseUint(strings.TrimPrefix(upper, wire.NumberedRcode), 10, bits); err == nil {
		small := uint16(code)
		return &small, nil
	}
	return nil, fmt.Errorf("rcode %q: want the name of a response code such as SERVFAIL, or RCODE17", text)
}

// setClient sets the client from an address, with or without a port, a prefix, a uid, or the name of a unit.
func (f *Filter) setClient(text string) {
	if text == "" {
		return
	}
	if prefix, err := netip.ParsePrefix(text); err == nil {
		f.addr = prefix.Masked()
		return
	}
	if addr, port, ok := parseAddr(text); ok {
		f.addr, f.port = netip.PrefixFrom(addr, addr.BitLen()), port
		return
	}
	f.wantOwner = true
	const digits = 10 // how many the largest uid has; the ID of a container is longer, and may consist of digits only
	if n, err := strconv.ParseUint(text, 10, 32); err == nil && len(text) <= digits {
		uid := uint32(n)
		f.uid = &uid
		return
	}
	f.unit = text
}

// parseAddr returns an address, and its port if it has one.
func parseAddr(text string) (addr netip.Addr, port uint16, ok bool) {
	if both, err := netip.ParseAddrPort(text); err == nil {
		addr, port = both.Addr(), both.Port()
	} else if addr, err = netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")); err != nil {
		return addr, 0, false
	}
	return addr.Unmap().WithZone(""), port, true
}

// selectsServer reports whether a text names the nameserver that f selects, in the form of upstream.Spec.String, as a word.
func (f *Filter) selectsServer(text string) bool {
	return slices.ContainsFunc(strings.Fields(text), func(name string) bool {
		name = bareServer(strings.TrimSuffix(name, ":"))
		host, _, err := net.SplitHostPort(name)
		return name == f.server || err == nil && host == f.server
	})
}

// bareServer returns the name of a nameserver, as upstream.Spec.String writes it, without what only TLS needs.
func bareServer(name string) string {
	name, _, _ = strings.Cut(strings.TrimPrefix(name, "tls://"), "#")
	return name
}

// mayWant reports whether f may select a query. The fields Rows, Reason and Who of the query need not be set yet.
func (f *Filter) mayWant(q *Query) bool {
	switch {
	case f.noteworthy && !q.Kind.noteworthy(),
		!q.Kind.noteworthy() && q.Source == probe && f.source != probe,
		f.failures && q.Kind != Failure,
		f.denied && !q.Denied,
		f.qtype != nil && q.Type != *f.qtype,
		f.minTook > 0 && q.Took < f.minTook,
		f.source != "" && q.Source != f.source,
		f.name != "" && !q.Name.Below(f.name),
		f.addr.IsValid() && !f.addr.Contains(q.Client.Addr().WithZone("")),
		f.port != 0 && q.Client.Port() != f.port,
		f.rcode != nil && q.Rcode != *f.rcode,
		f.server != "" && !q.Kind.noteworthy() && !f.selectsServer(q.Server):
		return false
	}
	return true
}

// wants reports whether f selects a query, but does not check the unit. mayWant must have returned true for the
// query.
func (f *Filter) wants(q *Query) bool {
	if f.server != "" && !f.selectsServer(q.Server+" "+q.Reason) {
		return false
	}
	return f.uid == nil || q.Who.Known && q.Who.UID == *f.uid
}

// byOwner reports whether f selects queries by the owner of the client's socket.
func (f *Filter) byOwner() bool { return f.uid != nil || f.unit != "" }

// isUnit reports whether the client of a query belongs to the unit that f selects. path is the path of the client's
// cgroup.
func (f *Filter) isUnit(path string) bool {
	if f.unit == "" {
		return true
	}
	return path != "" && (UnitOf(path) == f.unit || path == f.unit || strings.Contains(path+"/", "/"+f.unit+"/") ||
		strings.Contains(path+"/", "/"+f.unit+".service/") || isContainer(path, f.unit))
}
