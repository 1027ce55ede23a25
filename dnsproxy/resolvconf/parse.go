// Package resolvconf reads resolv.conf(5), which names the nameservers, and watches
// it for changes.
//
//	files := resolvconf.Files{} // /etc/resolv.conf
//	conf, err := files.Read()
//	…
//	watcher := resolvconf.Watcher{Files: files, Current: conf, Changed: use, Failed: count}
//	err = watcher.Run(ctx)
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

// glibc's bounds (resolv/resolv.h: RES_MAXRETRANS, RES_MAXRETRY).
const (
	maxTimeout  = 30 // seconds
	maxAttempts = 5
)

const (
	// dnsPort is where the nameservers of a resolv.conf listen.
	dnsPort = 53
	// maxIgnored and maxQuoted bound what is logged about a file of junk: the number of
	// sentences, and the bytes of a quoted word.
	maxIgnored = 16
	maxQuoted  = 64
)

// A Config is the content of a resolv.conf. It never changes.
type Config struct {
	// Servers are the nameservers in their order, each once, on port 53. There may be more than three; glibc uses
	// only the first three, because it waits for dead nameservers before it asks the next one. There may be none;
	// glibc would then ask 127.0.0.1, where either the agent itself listens, or no program.
	//
	// A link-local IPv6 address has the zone that the file gives; other addresses have no zone. IPv4-mapped
	// addresses are IPv4 addresses here. In place of 0.0.0.0 and ::, Servers has the loopback address that the
	// kernel would use.
	Servers []netip.AddrPort
	// Search is the search list in its order: the words of the last search or
	// domain line, whether they are domain names or not. Without such a line it is
	// empty. glibc would derive a domain from the host name; but the agent may run in a container whose host name
	// differs from the host name of the clients.
	Search []string
	// Timeout is how long to wait for a reply, 1 s to 30 s; zero if the file has no such
	// option.
	Timeout time.Duration
	// Attempts is how often all servers are tried, 1 to 5; zero if the file has no such
	// option.
	Attempts int
	// Rotate, UseVC (TCP only) and TrustAD are the options of these names. There is no field
	// for edns0: every nameserver that supports EDNS is asked with it.
	Rotate, UseVC, TrustAD bool
	// Uplink is the file whose servers replace systemd-resolved's stub. It is empty if the
	// resolv.conf does not name the stub, or the stub could not be replaced.
	Uplink string
	// Ignored lists what could not be used. Each element is a sentence with the value and
	// what was expected.
	Ignored []string
}

// Parse parses the text of a resolv.conf(5). [Config.Ignored] lists what it cannot use.
// Settings that concern only the client itself (sortlist, and options such as
// single-request) have no effect. Unlike glibc, Parse accepts indented lines, and comments
// after # or ; anywhere in a line.
func Parse(text []byte) *Config {
	p := parser{conf: new(Config)}
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
	unlisted int // number of problems beyond maxIgnored
}

// line parses one line's keyword and values.
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
		if len(values) > 0 { // an empty search line keeps the list, as in glibc
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

// server parses the value of a nameserver line.
func (p *parser) server(value string) {
	value, _, _ = strings.Cut(strings.ReplaceAll(value, ";", "#"), "#") // glibc ends an address there
	addr, err := netip.ParseAddr(value)
	if err != nil || addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		p.ignore("nameserver %s: want the IP address of one server, without a port", quote(value))
		return
	}
	addr = addr.Unmap()
	if !addr.IsLinkLocalUnicast() {
		addr = addr.WithZone("") // a zone has no meaning in such an address, and would make two servers of one
	}
	server := netip.AddrPortFrom(hostOf(addr), dnsPort)
	if !slices.Contains(p.conf.Servers, server) {
		p.conf.Servers = append(p.conf.Servers, server)
	}
}

// hostOf returns the address at which a packet to addr arrives. For the unspecified address, this is the loopback
// address; for any other address, it is addr.
func hostOf(addr netip.Addr) netip.Addr {
	switch addr {
	case netip.IPv4Unspecified():
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case netip.IPv6Unspecified():
		return netip.IPv6Loopback()
	}
	return addr
}

// option parses one word of an options line. If several options have the same name, the last one wins.
func (p *parser) option(option string) {
	name, value, _ := strings.Cut(option, ":")
	switch name {
	case "timeout":
		if n, ok := p.number(option, value, maxTimeout); ok {
			p.conf.Timeout = time.Duration(max(n, 1)) * time.Second // glibc waits 1 s for 0 too
		}
	case "attempts":
		if n, ok := p.number(option, value, maxAttempts); ok {
			p.conf.Attempts = max(n, 1) // with 0 nothing would be resolved
		}
	case "rotate":
		p.conf.Rotate = true
	case "use-vc":
		p.conf.UseVC = true
	case "edns0":
		// Queries have an OPT record in any case.
	case "trust-ad":
		p.conf.TrustAD = true
	case "debug", "inet6", "ip6-bytestring", "ip6-dotint", "ndots", "no-aaaa", "no-check-names", "no-ip6-dotint",
		"no-reload", "no-tld-query", "no_tld_query", "single-request", "single-request-reopen", "strict-error":
		// These options change what the client asks, or how it reads replies.
	default:
		p.ignore("option %s: want one from resolv.conf(5)", quote(option))
	}
}

// number parses an option's number. A number above limit counts as limit.
func (p *parser) number(option, value string, limit uint64) (n int, ok bool) {
	// For a number of more than 64 bits ParseUint returns an error and the largest number.
	wide, err := strconv.ParseUint(value, 10, 64)
	if err != nil && wide == 0 {
		p.ignore("option %s: want a number from 0 to %d after the colon", quote(option), limit)
		return 0, false
	}
	return int(min(wide, limit)), true
}

// ignore notes a problem in Config.Ignored.
func (p *parser) ignore(format string, args ...any) {
	if len(p.conf.Ignored) == maxIgnored {
		p.unlisted++
		return
	}
	p.conf.Ignored = append(p.conf.Ignored, fmt.Sprintf(format, args...))
}

// quote returns value in quotes. It shortens a long value.
func quote(value string) string {
	if len(value) > maxQuoted {
		return strconv.Quote(value[:maxQuoted]) + "..."
	}
	return strconv.Quote(value)
}
