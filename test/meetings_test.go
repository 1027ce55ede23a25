package test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// dbIP is the address of the mesh's db.secret.example.
const dbIP = "10.1.0.2"

// pushSuffixes pushes hosts below the suffixes of suffixFlags.
func (h *host) pushSuffixes() {
	h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		mesh:                {Ips: []string{meshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
		"db.secret.example": {Ips: []string{dbIP}, Registry: "External"},
		"api.open.example":  {Ips: []string{"10.1.0.3"}, Registry: "External"},
	}})
}

// suffixFlags forward the names of one suffix, and never forward those of others.
func suffixFlags() []string {
	return []string{"--bypass", "open.example", "--local-only", "secret.example,svc.cluster.local"}
}

// suffixConf is a resolv.conf with a search list.
func suffixConf(options string, servers ...string) string {
	lines := []string{"search shop.svc.cluster.local svc.cluster.local corp.example", "options ndots:5 " + options}
	for _, server := range servers {
		lines = append(lines, "nameserver "+server)
	}
	return strings.Join(lines, "\n") + "\n"
}

// knows makes a nameserver answer only some names, with one address.
func knows(server *fakedns.Server, address, ttl string) {
	var records []string
	for _, name := range []string{"www.example.org", "api.open.example", "intra.corp.example"} {
		records = append(records, name+". "+ttl+" IN A "+address)
	}
	server.Handle(fakedns.Answer(records...))
}

// suffixes queries a nameserver, which answers its names with address, for names of each
// kind.
func (v *vm) suffixes(server, address string) {
	v.tb.Helper()
	for _, over := range []string{"+notcp", "+tcp"} {
		for name, want := range map[string]string{
			"www.example.org":                         address,
			"api.open.example":                        address,
			"intra.corp.example":                      address,
			"intra.shop.svc.cluster.local":            "NXDOMAIN",
			"api.open.example.shop.svc.cluster.local": "NXDOMAIN",
			"web.corp.example":                        meshIP,
			mesh:                                      meshIP,
			"db.secret.example":                       dbIP,
			"none.secret.example":                     "NXDOMAIN",
			"none.shop.svc.cluster.local":             "NXDOMAIN",
		} {
			if got := v.dig(over, "@"+server, name); got != want {
				v.tb.Errorf("dig %s @%s %s: %s, want %s", over, server, name, got, want)
			}
		}
	}
}

// TestCapturedSettings checks that the settings of names apply to captured queries, over
// both families, whether the agent forwards over UDP or TCP. Queries for a nameserver that
// resolv.conf does not name go to that nameserver only, also after a change of resolv.conf.
func TestCapturedSettings(t *testing.T) { // F12, F13, F14, F8
	t.Parallel()
	for _, options := range []string{"", "use-vc"} {
		t.Run("options "+options, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, "nft")
			v.pushSuffixes()
			v.resolvConf = v.write("resolv.conf", suffixConf(options, named, named6))
			servers := []*fakedns.Server{v.named, v.named6, v.other, v.other6}
			knows(v.named, namedIP, "60")
			knows(v.named6, namedIP, "60")
			knows(v.other, otherIP, "60")
			knows(v.other6, otherIP, "60")
			v.capture(suffixFlags()...)
			for _, server := range []string{named, other, named6, other6, named} {
				v.suffixes(server, map[bool]string{true: namedIP, false: otherIP}[server == named || server == named6])
			}
			v.replace("resolv.conf", strings.Replace(suffixConf(options, other, other6), "corp.example", "corp.example next.example", 1))
			wait.Until(t, "the new search list is in use", func() bool { return v.dig("@"+other, "web.next.example") == meshIP })
			v.suffixes(other6, otherIP)
			v.suffixes(named, namedIP)
			for _, server := range servers {
				for _, q := range server.Queries() {
					if dns.IsSubDomain("secret.example.", q.Name) || dns.IsSubDomain("svc.cluster.local.", q.Name) {
						t.Errorf("%s was asked for %s", server.Addr, q.Name)
					}
				}
			}
		})
	}
}

// TestCapturedOutage checks that captured queries to silent nameservers of resolv.conf get
// stale answers, over both families, and that other nameservers answer their own queries.
// The supervisor does not restart the agent because of this, nor because of a flood.
func TestCapturedOutage(t *testing.T) { // F8, F9, F10, F14, K15
	t.Parallel()
	v := newVM(t, "nft")
	v.resolvConf = v.write("resolv.conf", suffixConf("", named, named6))
	knows(v.named, namedIP, "2")
	knows(v.named6, namedIP, "2")
	knows(v.other, otherIP, "2")
	v.capture("--supervise")
	www := func(server string) string {
		address, _ := v.ask(server, "www.example.org")
		return address
	}
	count := func(server *fakedns.Server) (n int) {
		for _, q := range server.Queries() {
			if q.Name == "www.example.org." {
				n++
			}
		}
		return n
	}
	asked := 0
	wait.Until(t, "names that are queried often are refreshed", func() bool {
		if got := www(named); got != namedIP {
			t.Errorf("@%s: %s", named, got)
		}
		if got := www(other); got != otherIP {
			t.Errorf("@%s: %s", other, got)
		}
		asked++
		return count(v.named)+count(v.named6) > 2
	})
	if n := count(v.other); n < asked {
		t.Errorf("the other nameserver received %d queries of %d clients", n, asked)
	}
	for _, server := range []*fakedns.Server{v.named, v.named6, v.other} {
		server.Handle(fakedns.Silence)
	}
	wait.Until(t, "answers are stale", func() bool {
		for _, server := range []string{named, named6} {
			got, ttl := v.ask(server, "www.example.org")
			if got != namedIP {
				t.Errorf("@%s: %s", server, got)
			}
			if ttl != 30 {
				return false
			}
		}
		return true
	})
	if got := www(other); got != "SERVFAIL" {
		t.Errorf("@%s: %s", other, got)
	}
	v.flood(20_000)
	for _, server := range []string{named, named6} {
		v.asked(server, meshIP)
		if got := www(server); got != namedIP {
			t.Errorf("during the flood, @%s: %s", server, got)
		}
	}
	knows(v.named, "192.0.2.99", "60")
	wait.Until(t, "the agent uses the nameserver again", func() bool { return www(named6) == "192.0.2.99" })
	if n := v.metric("nametap_restarts_total"); n != 0 {
		t.Errorf("%v restarts", n)
	}
}

// flood queries the nameserver of resolv.conf for that many names, each in a separate
// domain, without waiting for answers, and queries a mesh name in between.
func (v *vm) flood(queries int) {
	v.tb.Helper()
	var socket net.Conn
	var err error
	v.Run(func() { socket, err = net.Dial("udp", net.JoinHostPort(named, "53")) })
	if err != nil {
		v.tb.Fatal(err)
	}
	defer socket.Close()
	for n := range queries {
		packet, err := new(dns.Msg).SetQuestion(fmt.Sprintf("w.zone%d.example%d.", n, n), dns.TypeA).Pack()
		if err != nil {
			v.tb.Fatal(err)
		}
		_, _ = socket.Write(packet) // the buffers may be full
		if n%500 == 499 {
			if got := v.dig("+tcp", "@"+named, mesh); got != meshIP {
				v.tb.Errorf("after %d queries: %s", n, got)
			}
		}
	}
}

// TestCircleEndsWithCapture checks that a loop through a stub ends with the rules: the agent uses the stub again.
func TestCircleEndsWithCapture(t *testing.T) { // F6, K7
	t.Parallel()
	v := newVM(t, "nft")
	v.resolvConf = v.write("resolv.conf", "nameserver "+stubAddr+"\n")
	v.stub()
	v.capabilities = nil // so the agent does not learn the original destination
	a := v.start()
	v.root(v.args("apply")...)
	if got := v.dig("@"+stubAddr, "www.example.org"); got != "SERVFAIL" {
		t.Errorf("in a loop: %s", got)
	}
	wait.Until(t, "the loop is detected", func() bool { return a.log.Count("its queries come back to this agent") > 0 })
	v.root(v.args("remove")...)
	wait.Until(t, "the agent uses the stub again", func() bool {
		return strings.HasPrefix(v.dig("-p", "15053", "@127.0.0.1", "www.example.net"), namedIP)
	})
	if n := a.log.Count("its queries no longer come back"); n != 1 {
		t.Errorf("logged %d times", n)
	}
}
