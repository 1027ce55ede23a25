package dnsproxy

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// A generator makes a random world and queries to it, determined by its seed. Its
// vocabulary is small, so that names collide.
type generator struct {
	*rand.Rand
	config Config
	search []string
	domain string // the cluster domain
	keys   []string
	infos  []*api.NameTable_NameInfo
}

// label63 is a label and long the labels of a name of maximal length.
var (
	label63 = strings.Repeat("l", 63)
	long    = strings.Join([]string{label63, label63, label63}, ".")
)

var (
	someLabels     = []string{"web", "db", "api", "a", "b", "svc", "shop", "bank", "x", "www", "_tcp", "local", label63}
	someNamespaces = []string{"shop", "bank", "web", "svc", "Shop", "localhost"}
	someTails      = []string{
		"example.com", "corp.example", "example", "deep.wild.example.com", "wild.example.com", "shop", "svc", "bank",
		"localhost", "invalid", "10.in-addr.arpa", "svc.remote.local", "svc.clusterset.local",
	}
	badNames = []string{
		"", ".", "*", "*.", "*..", "a..example", ".example", "a.example..", "a b.example", "bücher.example", "a.*.example",
		"*a.example", "l" + label63 + ".example", `a\.b.example`, "http://example", long + "." + label63, "\xff.example",
	}
	badAddresses = []string{"", "nowhere", "192.0.2.300", "fe80::1%eth0", "0.0.0.0", "::", "1.2.3", "::ffff:0.0.0.0"}
)

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0))}
	namespace := pick(g, "", "shop", "shop", "bank", "Shop", "web")
	g.domain = pick(g, "cluster.local", "cluster.local", "mesh.corp", "Cluster.Local", "local", "a."+long)
	domain := pick(g, "", "", "svc.", namespace+".svc.") + g.domain
	g.config = Config{
		Namespace: namespace, Domain: strings.TrimPrefix(domain, ".") + pick(g, "", "", "."),
		TTL:         time.Duration(pick(g, 1, 30, 86400, 1<<31-1)) * time.Second,
		EDNSUDPSize: pick(g, 1232, 1232, 512, 513, 4096, 65534),
	}
	if strings.HasPrefix(g.config.Domain, "svc.svc.") {
		g.config.Domain = g.domain
	}
	searchable := []string{
		namespace + ".svc." + g.domain, "svc." + g.domain, g.domain, "corp.example", "example", "local", "svc", "localhost",
		"wild.example.com", "Corp.EXAMPLE.", label63, long, "bad..name", ".", "*.example", "shop.svc." + g.domain,
	}
	for range g.IntN(7) {
		if s := pick(g, searchable...); s[0] != '.' || s == "." {
			g.search = append(g.search, g.recased(s))
		}
	}
	if g.one(3) { // suffixes in settings
		for range 1 + g.IntN(3) {
			g.config.Bypass = append(g.config.Bypass, g.suffix())
			g.config.LocalOnly = append(g.config.LocalOnly, g.suffix())
		}
	}
	return g
}

func pick[T any](g *generator, from ...T) T { return from[g.IntN(len(from))] }

// one reports true with a probability of 1/n.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

// recased returns s, sometimes in random case.
func (g *generator) recased(s string) string {
	if !g.one(3) {
		return s
	}
	b := []byte(s)
	for i, c := range b {
		if folded := c | 0x20; folded >= 'a' && folded <= 'z' {
			b[i] = folded &^ byte(g.IntN(2)<<5)
		}
	}
	return string(b)
}

// name returns a name of the vocabulary.
func (g *generator) name() string {
	var labels []string
	for range g.IntN(3) {
		labels = append(labels, pick(g, someLabels...))
	}
	return strings.Join(append(labels, pick(g, append(someTails, g.domain, "svc."+g.domain, pick(g, someLabels...))...)), ".")
}

// suffix returns a suffix of the vocabulary that a setting may name.
func (g *generator) suffix() string {
	return g.recased(pick(g, "corp.example", "example.com", "wild.example.com", "svc."+g.domain, g.domain, "shop.svc."+g.domain,
		"bank.svc."+g.domain, "10.in-addr.arpa", "svc", "a", g.name()))
}

// table makes the world's table.
func (g *generator) table() map[string]*api.NameTable_NameInfo {
	table := map[string]*api.NameTable_NameInfo{}
	for range pick(g, 0, 1, 5, 20, 60, 150) {
		key, info := g.entry()
		if len(g.keys) > 0 && g.one(8) { // another spelling of a key
			key = strings.TrimSuffix(pick(g, g.keys...), ".") + pick(g, "", ".")
		}
		key = g.recased(key)
		if g.one(12) {
			key = strings.TrimSuffix(key, ".") + "."
		}
		if strings.ToValidUTF8(key, "") != key || table[key] != nil {
			continue // a NameTable cannot hold it
		}
		table[key] = info
		g.keys, g.infos = append(g.keys, key), append(g.infos, info)
	}
	return table
}

// before makes the table of the previous push: a part of the current one, some of it with
// other addresses.
func (g *generator) before(table map[string]*api.NameTable_NameInfo) map[string]*api.NameTable_NameInfo {
	part := map[string]*api.NameTable_NameInfo{}
	for _, key := range g.keys {
		switch g.IntN(4) {
		case 0:
			_, part[key] = g.entry()
		case 1:
		default:
			part[key] = table[key]
		}
	}
	return part
}

// entry makes an entry.
func (g *generator) entry() (key string, info *api.NameTable_NameInfo) {
	defer func() {
		if g.one(3) { // endpoints of several clusters
			info.Near = uint32(g.IntN(len(info.GetIps()) + 2)) //nolint:gosec // few
		}
	}()
	short, namespace := pick(g, someLabels...), pick(g, someNamespaces...)
	if g.one(5) {
		short = pick(g, "web-0", "db-0", "web") + "." + short
	}
	info = &api.NameTable_NameInfo{Ips: g.ips(), Registry: pick(g, "External", "External", "", "Consul", "Kubernetes")}
	if g.one(30) {
		return pick(g, badNames...), info
	}
	if g.one(8) { // an alias, at times of another entry
		if info.Alias = g.recased(pick(g, g.name(), pick(g, append(g.keys, "x")...), pick(g, badNames[:13]...))); g.one(4) {
			info.Alias += "."
		}
	}
	if g.one(3) { // the control plane lets an external host have a name of the cluster
		info.Namespace = namespace
	}
	service := func(domain string) string {
		info.Registry, info.Shortname, info.Namespace = "Kubernetes", g.recased(short), g.recased(namespace)
		if g.one(10) {
			info.Shortname, info.Namespace = pick(g, "", "not a label", short), pick(g, "", namespace)
		}
		if info.Headless = g.one(2); len(g.infos) > 0 && g.one(2) { // at times a pod of a headless Service
			info.Ips = pick(g, g.infos...).GetIps()
		}
		for g.one(2) {
			info.Ports = append(info.Ports, g.port(info))
		}
		return short + "." + namespace + ".svc." + domain
	}
	switch g.IntN(12) {
	case 0, 1, 2, 3:
		return service(g.domain), info
	case 4:
		if pod, of, found := strings.Cut(short, "."); found && g.one(2) { // of a ServiceImport
			short = pod + "." + pick(g, someLabels...) + "." + of
		}
		return service(pick(g, "remote.local", "clusterset.local", "not"+g.domain)), info
	case 5: // a Service whose FQDN says something else
		service(g.domain)
		return pick(g, someLabels...) + "." + g.domain, info
	case 6, 7:
		return "*." + g.name(), info
	case 8:
		if len(g.search) > 0 { // expanded with a search domain
			return g.name() + "." + pick(g, g.search...), info
		}
	case 9: // a short name of another host
		return pick(g, short, short+"."+namespace, short+"."+namespace+".svc"), info
	case 10: // the longest name, and one byte more
		name := long + "." + strings.Repeat("x", 59+g.IntN(4)) + ".e"
		return pick(g, "", "", "*.") + name[g.IntN(4):], info
	}
	return g.name(), info
}

// port makes a port of an entry.
func (g *generator) port(info *api.NameTable_NameInfo) *api.NameTable_Port {
	p := &api.NameTable_Port{
		Name:     pick(g, "http", "http", "Web", "a", "", "", label63[1:], label63, "a.b", "*", "*.a", "_", "é"),
		Number:   pick[uint32](g, 80, 80, 8080, 65535, 0, 65536, 1<<32-1),
		Protocol: pick(g, "", "TCP", "UDP", "Sctp", "QUIC"),
	}
	for len(info.GetIps()) > 0 && info.GetHeadless() && g.one(2) {
		p.Ips = append(p.Ips, pick(g, pick(g, info.GetIps()...), "10.9.9.9", "nowhere", "::ffff:10.0.0.1"))
	}
	return p
}

// ips returns the addresses of an entry.
func (g *generator) ips() []string {
	var ips []string
	for range pick(g, 0, 1, 1, 1, 1, 2, 3, 8, 30, pick(g, 60, 300)) {
		n := g.IntN(700)
		ips = append(ips, pick(g, fmt.Sprintf("10.0.%d.%d", n/250, n%250), fmt.Sprintf("2001:db8::%x", n+1)))
	}
	switch g.IntN(12) {
	case 0:
		ips = append(ips, pick(g, badAddresses...))
	case 1:
		ips = append(ips, "::ffff:10.0.0."+pick(g, "1", "2"))
	case 2:
		ips = append(ips, ips...)
	case 3, 4: // of one family
		for i := range ips {
			ips[i] = fmt.Sprintf("2001:db8::%x", g.IntN(700)+1)
		}
	}
	return ips
}

// asked returns a name to query: one that a host may have, then changed.
func (g *generator) asked() []string {
	var name string
	if n := len(g.keys); n > 0 && !g.one(8) {
		i := g.IntN(n)
		name = strings.TrimSuffix(g.keys[i], ".")
		info := g.infos[i]
		switch g.IntN(8) {
		case 0, 1:
			if info.GetShortname() != "" {
				name = info.GetShortname() + pick(g, "", "."+info.GetNamespace(), "."+info.GetNamespace()+".svc")
			}
		case 2:
			if len(info.GetIps()) > 0 {
				name, _ = dns.ReverseAddr(pick(g, info.GetIps()...))
			}
		}
		if len(info.GetIps()) > 0 && g.one(4) { // an endpoint
			name = pick(g, strings.NewReplacer(".", "-", ":", "-").Replace(pick(g, info.GetIps()...)), "10-0-0-1", "2001-db8--1",
				"2001-db8-0--1", "10-0-0-01", "1-2-3-4-5-6-7-8", "10-0-0-256") + "." + name
		}
	} else {
		name = pick(g, g.name(), "1.0.0.10.in-addr.arpa", "", g.domain, pick(g, "localhost", "a.invalid",
			"x.onion", "_dns.resolver.arpa", "1.0.0.127.in-addr.arpa", "0.127.in-addr.arpa", "0.in-addr.arpa", "255.255.255.255.in-addr.arpa",
			"1."+strings.Repeat("0.", 31)+"ip6.arpa", strings.Repeat("0.", 32)+"ip6.arpa"))
	}
	if rest, ok := strings.CutPrefix(name, "*."); ok {
		name = pick(g, "", "x.", "x.y.z.", label63+".", "*.") + rest
	}
	if g.one(6) { // a port
		name = pick(g, "_http._tcp", "_http._tcp", "_WEB._udp", "_a._sctp", "_._tcp", "_"+label63[1:]+"._tcp", "http.tcp", "_tcp", "_http._quic") + "." + name
	}
	names := []string{name}
	for len(g.search) > 0 && g.one(3) {
		names = append(names, strings.TrimSuffix(pick(g, g.search...), "."))
	}
	name = strings.Trim(strings.Join(names, "."), ".")
	if name == "" {
		return nil
	}
	return g.changed(strings.Split(name, "."))
}

// changed returns a name with changed labels.
func (g *generator) changed(labels []string) []string {
	at := g.IntN(len(labels))
	switch g.IntN(28) {
	case 0:
		labels = append([]string{pick(g, someLabels...)}, labels...)
	case 1:
		labels = labels[1:]
	case 2:
		labels = append(labels[:at:at], labels[at+1:]...)
	case 3:
		labels = append(labels[:at:at], append([]string{labels[at]}, labels[at:]...)...)
	case 4:
		labels[at] = pick(g, labels[at]+"x", "x"+labels[at], "a.b", "\x00", `\`, "é", "*", labels[at]+"@", "{[", strings.Repeat("y", 63))
	case 5, 6: // filled up to the longest length and beyond
		length := 1
		for _, label := range labels {
			length += len(label) + 1
		}
		for want := 252 + g.IntN(6); length < want-1; {
			n := min(63, want-length-1)
			labels = append([]string{strings.Repeat(pick(g, "p", "Q"), n)}, labels...)
			length += n + 1
		}
	}
	return labels
}

// query makes a query and its transport, at times with an EDNS size that is just enough for
// the response or just too small.
func (g *generator) query(r *reference) ([]byte, transport) {
	over := pick(g, overUDP, overTCP)
	packet := make([]byte, 12, 600)
	packet[5] = 1 // question
	binary.BigEndian.PutUint16(packet, uint16(g.Uint32()))
	binary.BigEndian.PutUint16(packet[2:], uint16(g.Uint32())&pick[uint16](g, 0x0100, 0x0110, 0x0130, 0x07FF))
	for _, label := range g.asked() {
		packet = append(append(packet, byte(len(label))), g.recased(label)...)
	}
	packet = append(packet, 0)
	qtype := pick(g, dns.TypeA, dns.TypeA, dns.TypeAAAA, dns.TypeANY, pick(g, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeTXT,
		dns.TypeMX, dns.TypeSRV, dns.TypePTR, dns.TypeSOA, dns.TypeAXFR, dns.TypeIXFR, dns.TypeCNAME, uint16(g.Uint32())))
	if packet[len(packet)-2] == 'a' && g.one(2) { // of arpa
		qtype = dns.TypePTR
	}
	if strings.HasPrefix(string(packet[13:]), "_") && !g.one(4) || g.one(12) {
		qtype = dns.TypeSRV
	}
	packet = binary.BigEndian.AppendUint16(packet, qtype)
	packet = binary.BigEndian.AppendUint16(packet, dns.ClassINET)
	if g.one(2) {
		packet = g.addOPT(packet, r)
	}
	if g.one(12) {
		packet = g.damaged(packet)
	}
	return packet, over
}

// addOPT adds an OPT record to a query.
func (g *generator) addOPT(packet []byte, r *reference) []byte {
	size := pick(g, 0, 100, 511, 512, 513, 800, 1231, 1232, 1233, 4096, 65535, g.IntN(1<<16))
	binary.BigEndian.PutUint16(packet[10:], 1)
	packet = append(packet, 0, 0, byte(dns.TypeOPT))
	at := len(packet)
	packet = binary.BigEndian.AppendUint16(packet, uint16(size))
	packet = append(packet, byte(pick(g, 0, 0, g.IntN(256))), byte(g.IntN(20)/19), byte(pick(g, 0, 0x80, g.IntN(256))), 0)
	var options []byte
	for g.one(3) {
		n := g.IntN(20)
		options = binary.BigEndian.AppendUint16(options, uint16(pick(g, 3, 8, 10, 12, 15, g.IntN(1<<16))))
		options = binary.BigEndian.AppendUint16(options, uint16(n))
		options = append(options, make([]byte, n)...)
	}
	if g.one(20) {
		options = append(options, 1)
	}
	packet = append(binary.BigEndian.AppendUint16(packet, uint16(len(options))), options...)
	if q := parseRef(packet); q.demand != mustHandOn && g.one(2) {
		if resp, _ := r.answer(&q); resp != nil {
			edge := refMessageLen(&q, append(resp.Answer, resp.Ns...)...) + pick(g, -1, 0, 1, g.IntN(60)-30)
			binary.BigEndian.PutUint16(packet[at:], uint16(min(max(edge, 0), 65535)))
		}
	}
	return packet
}

// damaged returns a packet that is unusual or malformed.
func (g *generator) damaged(packet []byte) []byte {
	add := func(count int, record string) []byte {
		packet[count]++
		return append(packet, record...)
	}
	switch g.IntN(9) {
	case 0:
		return packet[:g.IntN(len(packet))]
	case 1:
		return append(packet, make([]byte, 1+g.IntN(20))...)
	case 2:
		packet[g.IntN(len(packet))] ^= 1 << g.IntN(8)
	case 3: // any byte of the header
		packet[2+g.IntN(10)] = byte(g.IntN(256))
	case 4:
		return add(11, "\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00")
	case 5:
		return add(11, "\x01x\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00")
	case 6:
		return add(pick(g, 7, 9, 11), "\x00\x00\x01\x00\x01\x00\x00\x00\x00\x00\x04\x0a\x00\x00\x01")
	case 7: // a question whose name ends in a pointer to a zero byte of the header
		for i := 12; i < len(packet); i += 1 + int(packet[i]) {
			if packet[i] == 0 {
				return append(append(packet[:i:i], 0xC0, 4), packet[i+1:]...)
			}
		}
	case 8: // another class
		q := parseRef(packet)
		packet[max(2, 12+len(q.question)-1)] = byte(g.IntN(256))
	}
	return packet
}
