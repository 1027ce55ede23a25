package resolvconf

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// glibc's bounds (resolv/resolv.h: RES_MAXNDOTS, RES_MAXRETRANS, RES_MAXRETRY).
const (
	maxNdots    = 15
	maxTimeout  = 30 // seconds
	maxAttempts = 5
)

const (
	// dnsPort is where the nameservers of a resolv.conf listen.
	dnsPort = 53
	// maxIgnored and maxQuoted bound what a file of junk says in a log.
	maxIgnored = 16
	maxQuoted  = 64
)

// A Config is what a resolv.conf says. It never changes once made.
type Config struct {
	// Servers are the nameservers in their order, each once, on port 53. All are
	// kept where glibc keeps three: it asks one after another and so waits for
	// the dead ones, whoever prefers the quick ones is better off with more. A
	// file may name none; glibc would ask 127.0.0.1 then, which for a proxy is
	// itself or nobody.
	//
	// A link-local IPv6 address has the zone that the file gives, the others
	// have none. IPv4-mapped addresses are IPv4, and 0.0.0.0 and :: are the
	// loopback addresses that the kernel makes of them.
	Servers []netip.AddrPort
	// Search is the search list in its order: the words of the last search or
	// domain line as they stand there, whether they are domain names or not.
	// Without such a line it is empty; glibc would derive a domain from the host
	// name, but the host name of a container is not its clients'.
	Search []string
	// Ndots is how many dots make a name be tried as it is before the search
	// list, 0 to 15, and 1 where the file does not say.
	Ndots int
	// Timeout is how long a reply is awaited, 1 s to 30 s, and zero where the
	// file does not say.
	Timeout time.Duration
	// Attempts is how often all servers are tried, 1 to 5, and zero where the
	// file does not say.
	Attempts int
	// Rotate, UseVC (TCP only) and TrustAD are the options of these names. edns0 is none
	// of them: nameservers are always asked with EDNS, as it wants, but for those that
	// cannot take it.
	Rotate, UseVC, TrustAD bool
	// Uplink is the file whose servers stand in the place of systemd-resolved's
	// stub; empty where the file names no stub, or the stub had to stay.
	Uplink string
	// Ignored lists what could not be used, each a sentence with the value and
	// what was expected in its place.
	Ignored []string
}

// Parse reads the text of a resolv.conf(5). What it cannot use goes to
// [Config.Ignored]; what only concerns a client itself (sortlist, and options
// such as single-request) is passed over. Unlike glibc, it takes lines that are
// indented, and words after # or ; as a comment everywhere.
func Parse(text []byte) *Config {
	p := parser{conf: &Config{Ndots: 1}}
	for line := range bytes.Lines(text) {
		words := strings.Fields(string(line))
		comment := slices.IndexFunc(words, func(w string) bool { return w[0] == '#' || w[0] == ';' })
		if comment >= 0 {
			words = words[:comment]
		}
		if len(words) > 0 {
			p.line(words[0], words[1:])
		}
	}
	if p.unlisted > 0 {
		p.conf.Ignored = append(p.conf.Ignored, fmt.Sprintf("and %d more", p.unlisted))
	}
	return p.conf
}

// A parser fills a Config.
type parser struct {
	conf     *Config
	unlisted int // what was ignored beyond maxIgnored
}

// line reads one line's keyword and values.
func (p *parser) line(keyword string, values []string) {
	switch keyword {
	case "nameserver":
		if len(values) == 0 {
			p.ignore(`"nameserver": want an IP address after it`)
			return
		}
		p.server(values[0])
	case "domain":
		if len(values) > 0 {
			p.conf.Search = values[:1]
		}
	case "search":
		if len(values) > 0 { // an empty one leaves the list, as in glibc
			p.conf.Search = values
		}
	case "options":
		for _, option := range values {
			p.option(option)
		}
	case "sortlist":
	default:
		p.ignore("%s: want nameserver, search, domain or options", quote(keyword))
	}
}

// server reads the value of a nameserver line.
func (p *parser) server(value string) {
	if end := strings.IndexAny(value, "#;"); end >= 0 {
		value = value[:end] // glibc ends an address there
	}
	addr, err := netip.ParseAddr(value)
	if err != nil || addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		p.ignore("nameserver %s: want the IP address of one server, without a port", quote(value))
		return
	}
	addr = addr.Unmap()
	if !addr.IsLinkLocalUnicast() {
		addr = addr.WithZone("") // means nothing there, and would make one server two
	}
	server := netip.AddrPortFrom(hostOf(addr), dnsPort)
	if !slices.Contains(p.conf.Servers, server) {
		p.conf.Servers = append(p.conf.Servers, server)
	}
}

// hostOf returns the address that a packet to addr arrives at: loopback instead
// of the unspecified address.
func hostOf(addr netip.Addr) netip.Addr {
	switch addr {
	case netip.IPv4Unspecified():
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case netip.IPv6Unspecified():
		return netip.IPv6Loopback()
	}
	return addr
}

// option reads one word of an options line; the last one of a name wins.
func (p *parser) option(option string) {
	name, value, _ := strings.Cut(option, ":")
	switch name {
	case "ndots":
		if n, ok := p.number(option, value, maxNdots); ok {
			p.conf.Ndots = n
		}
	case "timeout":
		if n, ok := p.number(option, value, maxTimeout); ok {
			p.conf.Timeout = time.Duration(max(n, 1)) * time.Second // glibc waits 1 s for 0 too
		}
	case "attempts":
		if n, ok := p.number(option, value, maxAttempts); ok {
			p.conf.Attempts = max(n, 1) // none at all would be no resolver
		}
	case "rotate":
		p.conf.Rotate = true
	case "use-vc":
		p.conf.UseVC = true
	case "edns0":
		// Queries have an OPT record in any case.
	case "trust-ad":
		p.conf.TrustAD = true
	case "debug", "inet6", "ip6-bytestring", "ip6-dotint", "no-aaaa", "no-check-names", "no-ip6-dotint",
		"no-reload", "no-tld-query", "no_tld_query", "single-request", "single-request-reopen", "strict-error":
		// They change what a client asks, or how it reads the replies.
	default:
		p.ignore("option %s: want one that resolv.conf(5) names", quote(option))
	}
}

// number reads an option's number; what is above limit is limit.
func (p *parser) number(option, value string, limit uint64) (n int, ok bool) {
	// A number beyond 64 bits is an error with the largest one as its value.
	wide, err := strconv.ParseUint(value, 10, 64)
	if err != nil && wide == 0 {
		p.ignore("option %s: want a number from 0 to %d after the colon", quote(option), limit)
		return 0, false
	}
	return int(min(wide, limit)), true
}

// ignore notes what could not be used.
func (p *parser) ignore(format string, args ...any) {
	if len(p.conf.Ignored) == maxIgnored {
		p.unlisted++
		return
	}
	p.conf.Ignored = append(p.conf.Ignored, fmt.Sprintf(format, args...))
}

// quote returns value in quotes, cut if it is long.
func quote(value string) string {
	if len(value) > maxQuoted {
		return strconv.Quote(value[:maxQuoted]) + "..."
	}
	return strconv.Quote(value)
}
