package upstream

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

const (
	dnsPort   = 53
	tlsPort   = 853 // RFC 7858, section 3.1
	tlsScheme = "tls://"
)

// A Spec names a nameserver. Specs are comparable. Equal Specs name the same server, with one history.
type Spec struct {
	// Addr is the address on which the nameserver listens.
	Addr netip.AddrPort
	// TLS reports that the nameserver is asked over TLS only.
	TLS bool
	// ServerName is the name for which the nameserver's certificate must be valid. If it is
	// empty, the certificate must be valid for the address. Without TLS, ServerName is empty.
	ServerName string
}

// ParseSpec parses an address such as 192.0.2.53, or tls://192.0.2.53#dns.example. A port may follow the address;
// without it, the port is 53, or 853 for TLS. The # and the name may be left out. An IPv6 address with a port must
// be in brackets.
func ParseSpec(s string) (Spec, error) {
	rest, isTLS := strings.CutPrefix(s, tlsScheme)
	address, name, named := strings.Cut(rest, "#")
	spec := Spec{TLS: isTLS, ServerName: strings.TrimSuffix(name, ".")}
	if named && (!isTLS || spec.ServerName == "") {
		return Spec{}, fmt.Errorf("nameserver %q: want a name after # with %s, and only there", s, tlsScheme)
	}
	addr, err := parseAddr(address, isTLS)
	if err != nil || addr.Port() == 0 {
		return Spec{}, fmt.Errorf("nameserver %q: want an address such as 192.0.2.53, 192.0.2.53:53, "+
			"2001:db8::53, [2001:db8::53]:53 or tls://192.0.2.53#dns.example", s)
	}
	spec.Addr = addr
	return spec, nil
}

// parseAddr parses an address, or an address and a port.
func parseAddr(s string, isTLS bool) (netip.AddrPort, error) {
	port := uint16(dnsPort)
	if isTLS {
		port = tlsPort
	}
	bare := s
	if strings.HasPrefix(s, "[") && strings.HasSuffix(s, "]") {
		bare = s[1 : len(s)-1]
	}
	if addr, err := netip.ParseAddr(bare); err == nil {
		return netip.AddrPortFrom(addr.Unmap(), port), nil
	}
	addr, err := netip.ParseAddrPort(s)
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port()), err
}

// String returns the form that ParseSpec parses, without a port that is the default.
func (s Spec) String() string {
	if !s.TLS {
		return addrString(s.Addr, dnsPort)
	}
	text := tlsScheme + addrString(s.Addr, tlsPort)
	if s.ServerName != "" {
		text += "#" + s.ServerName
	}
	return text
}

func addrString(addr netip.AddrPort, port uint16) string {
	if addr.Port() == port {
		return addr.Addr().String()
	}
	host := addr.Addr().String()
	if addr.Addr().Is6() {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(int(addr.Port()))
}
