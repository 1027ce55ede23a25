package seen

import (
	"fmt"
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
	noteworthy bool
	name       wire.Name // the names below it
	qtype      uint16
	rcode      string
	source     string
	server     string
	slow       time.Duration

	// The client: one of these, or none.
	addr netip.Prefix
	uid  *uint32
	unit string
	// who says that the owner of the client's socket is to be found.
	who bool
}

// The parameters of a filter.
const (
	ParamFailed = "failed" // noteworthy queries only
	ParamName   = "name"   // a name and all below it
	ParamType   = "type"
	ParamRcode  = "rcode"
	ParamSource = "source"
	ParamServer = "server" // that answered, or failed to
	ParamSlow   = "slow"   // queries that took at least as long
	ParamClient = "client" // an address, a prefix, a uid, or a unit
	ParamWho    = "who"    // find the owner of every client's socket, not only of those of noteworthy queries
)

// sources are the sources of answers, as metrics name them.
func sources() []string {
	return []string{"table", "cache", "stale", "cached_failure", "upstream", "self", "probe"}
}

// ParseFilter returns the filter with parameters; those that are missing select all queries. An error says which
// one is wrong.
func ParseFilter(params url.Values) (f *Filter, err error) {
	f = &Filter{
		noteworthy: params.Get(ParamFailed) != "", who: params.Get(ParamWho) != "",
		server: params.Get(ParamServer), source: params.Get(ParamSource),
	}
	if text := params.Get(ParamName); text != "" {
		packed, err := wire.PackName(text)
		if err != nil {
			return nil, fmt.Errorf("name %q: want a domain name: %w", text, err)
		}
		f.name = wire.Fold(packed)
	}
	if text := params.Get(ParamType); text != "" {
		if f.qtype, err = parseType(text); err != nil {
			return nil, err
		}
	}
	if text := strings.ToUpper(params.Get(ParamRcode)); text != "" {
		if _, known := dns.StringToRcode[text]; !known && !strings.HasPrefix(text, "RCODE") {
			return nil, fmt.Errorf("rcode %q: want the name of a response code such as SERVFAIL, or RCODE17", text)
		}
		f.rcode = text
	}
	if f.source != "" && !slices.Contains(sources(), f.source) {
		return nil, fmt.Errorf("source %q: want one of %s", f.source, strings.Join(sources(), ", "))
	}
	if text := params.Get(ParamSlow); text != "" {
		if f.slow, err = time.ParseDuration(text); err != nil || f.slow <= 0 {
			return nil, fmt.Errorf("slow %q: want a time such as 200ms", text)
		}
	}
	f.setClient(params.Get(ParamClient))
	return f, nil
}

func parseType(text string) (uint16, error) {
	text = strings.ToUpper(text)
	if code, known := dns.StringToType[text]; known {
		return code, nil
	}
	if code, err := strconv.ParseUint(strings.TrimPrefix(text, "TYPE"), 10, 16); err == nil {
		return uint16(code), nil
	}
	return 0, fmt.Errorf("type %q: want a record type such as A, or TYPE65", text)
}

// setClient sets the client from an address, a prefix, a uid, or the name of a unit.
func (f *Filter) setClient(text string) {
	if text == "" {
		return
	}
	if prefix, err := netip.ParsePrefix(text); err == nil {
		f.addr = prefix.Masked()
		return
	}
	if addr, err := netip.ParseAddr(text); err == nil {
		f.addr = netip.PrefixFrom(addr, addr.BitLen())
		return
	}
	f.who = true
	if n, err := strconv.ParseUint(text, 10, 32); err == nil {
		uid := uint32(n)
		f.uid = &uid
		return
	}
	f.unit = text
}

// may reports whether a query may be selected, as far as is known without Rows, Reason and Who.
func (f *Filter) may(q *Query) bool {
	switch {
	case f.noteworthy && q.Kind == Ordinary,
		f.qtype != 0 && q.Type != f.qtype,
		f.slow > 0 && q.Took < f.slow,
		f.source != "" && q.Source != f.source,
		f.name != "" && !q.Name.Below(f.name),
		f.addr.IsValid() && !f.addr.Contains(q.Client.Addr()),
		f.rcode != "" && rcodeName(q.Rcode) != f.rcode,
		f.server != "" && q.Server != "" && !isServer(q.Server, f.server):
		return false
	}
	return true
}

// is reports whether a query is selected for which may is true, whatever its unit.
func (f *Filter) is(q *Query) bool {
	if f.server != "" && q.Server == "" && !strings.Contains(q.Reason, f.server) {
		return false
	}
	return f.uid == nil || q.Who.Known && q.Who.UID == *f.uid
}

// isServer reports whether a nameserver has an address, with or without its port.
func isServer(server, addr string) bool {
	return server == addr || strings.Contains("//"+strings.TrimPrefix(server, "tls://"), "//"+addr+":") ||
		strings.HasPrefix(server, "["+addr+"]") || strings.HasPrefix(server, "tls://"+addr)
}

// isUnit reports whether the client of a query has the unit that is selected. path is the path of its cgroup.
func (f *Filter) isUnit(path string) bool {
	if f.unit == "" {
		return true
	}
	return path != "" && (unitOf(path) == f.unit || path == f.unit || strings.Contains(path+"/", "/"+f.unit+"/") ||
		strings.Contains(path+"/", "/"+f.unit+".service/"))
}
