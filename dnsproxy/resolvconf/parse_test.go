package resolvconf_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
)

// servers returns the nameservers at these addresses.
func servers(addrs ...string) []netip.AddrPort {
	var list []netip.AddrPort
	for _, a := range addrs {
		list = append(list, netip.AddrPortFrom(netip.MustParseAddr(a), 53))
	}
	return list
}

// diff compares configurations.
func diff(want, got *resolvconf.Config) string {
	return cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{}))
}

// F5: the configuration of each kind of line, and the problems in it.
func TestParse(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       resolvconf.Config
	}{
		{"empty", "", resolvconf.Config{}},
		{
			"a pod's", "search default.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n",
			resolvconf.Config{
				Servers: servers("10.96.0.10"),
				Search:  []string{"default.svc.cluster.local", "svc.cluster.local", "cluster.local"},
			},
		},
		{
			"comments, CRLF, tabs, indented, no last newline",
			"# nameserver 192.0.2.1\r\n;nameserver 192.0.2.2\r\n\r\nnameserver\t10.0.0.1\t# one\r\n  nameserver 10.0.0.2;two\r\nsearch\ta  b # c\r\nnameserver 10.0.0.3",
			resolvconf.Config{Servers: servers("10.0.0.1", "10.0.0.2", "10.0.0.3"), Search: []string{"a", "b"}},
		},
		{
			"more than three, duplicates", "nameserver 10.0.0.1\nnameserver 10.0.0.2\nnameserver 10.0.0.1\nnameserver ::ffff:10.0.0.2\nnameserver 10.0.0.3\nnameserver 10.0.0.4\n",
			resolvconf.Config{Servers: servers("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")},
		},
		{
			"IPv6 and zones", "nameserver fe80::1%eth0\nnameserver fe80::1%eth1\nnameserver 2001:db8::1%eth0\nnameserver 2001:db8::1\n",
			resolvconf.Config{Servers: servers("fe80::1%eth0", "fe80::1%eth1", "2001:db8::1")},
		},
		{
			"this host", "nameserver 0.0.0.0\nnameserver ::\nnameserver 127.0.0.1\n",
			resolvconf.Config{Servers: servers("127.0.0.1", "::1")},
		},
		{"the last search wins", "search a b\ndomain c d\nsearch e\nsearch\ndomain\n", resolvconf.Config{Search: []string{"e"}}},
		{"the last domain wins", "search a b\ndomain c d\n", resolvconf.Config{Search: []string{"c"}}},
		{
			"options", "options timeout:3 attempts:4 rotate\noptions use-vc edns0 trust-ad ndots:2 single-request-reopen\nsortlist 10.0.0.0\n",
			resolvconf.Config{Timeout: 3 * time.Second, Attempts: 4, Rotate: true, UseVC: true, TrustAD: true},
		},
		{
			"beyond the bounds", "options timeout:99999999999999999999 attempts:6 ndots:16\n",
			resolvconf.Config{Timeout: 30 * time.Second, Attempts: 5},
		},
		{
			"zero, and the last of a name", "options timeout:5 attempts:3 ndots:5\noptions timeout:0 attempts:0 ndots:0\n",
			resolvconf.Config{Timeout: time.Second, Attempts: 1},
		},
		{
			"unusable", "nameserver 10.0.0.1:53\nnameserver\nnameserver 224.0.0.1\noptions timeout:3s frob\nfrobnicate\nnameserver 10.0.0.1\n",
			resolvconf.Config{Servers: servers("10.0.0.1"), Ignored: []string{
				`nameserver "10.0.0.1:53": want the IP address of one server, without a port`,
				`"nameserver": want an IP address after it`,
				`nameserver "224.0.0.1": want the IP address of one server, without a port`,
				`option "timeout:3s": want a number from 0 to 30 after the colon`,
				`option "frob": want one from resolv.conf(5)`,
				`"frobnicate": want nameserver, search, domain or options`,
			}},
		},
		{
			"a very long line", strings.Repeat("x", 70_000) + "\nnameserver 10.0.0.1\n",
			resolvconf.Config{Servers: servers("10.0.0.1"), Ignored: []string{
				`"` + strings.Repeat("x", 64) + `"...: want nameserver, search, domain or options`,
			}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if d := diff(&test.want, resolvconf.Parse([]byte(test.text))); d != "" {
				t.Errorf("Parse(%.200q): -want +got\n%s", test.text, d)
			}
		})
	}
}

// The number of sentences about a file of junk is bounded.
func TestParseJunk(t *testing.T) {
	var text strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&text, "junk%d\n", i)
	}
	ignored := resolvconf.Parse([]byte(text.String())).Ignored
	if len(ignored) != 17 || ignored[16] != "and 984 more" {
		t.Errorf("%d sentences, the last %q; want 16 and a number", len(ignored), ignored[len(ignored)-1])
	}
}

// F5: any file gives a configuration within bounds, which is the same when written and parsed
// again.
func FuzzParse(f *testing.F) {
	f.Add([]byte("search a b\r\nnameserver\t10.0.0.1 # c\nnameserver fe80::1%eth0\noptions ndots:5 timeout:99 attempts:0 edns0"))
	f.Add([]byte("domain x\nnameserver ::ffff:10.0.0.1\nnameserver 0.0.0.0\noptions use-vc trust-ad rotate:\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		conf := resolvconf.Parse(text)
		if conf.Timeout < 0 || conf.Timeout > 30*time.Second ||
			conf.Attempts < 0 || conf.Attempts > 5 || len(conf.Ignored) > 17 {
			t.Errorf("out of bounds: %+v", conf)
		}
		seen := map[netip.AddrPort]bool{}
		for _, s := range conf.Servers {
			a := s.Addr()
			if !s.IsValid() || s.Port() != 53 || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || seen[s] {
				t.Errorf("server %v of %v", s, conf.Servers)
			}
			seen[s] = true
		}
		// The servers and the search list, written to a file, are parsed as the same.
		var again strings.Builder
		for _, s := range conf.Servers {
			fmt.Fprintln(&again, "nameserver", s.Addr())
		}
		if len(conf.Search) > 0 {
			fmt.Fprintln(&again, "search", strings.Join(conf.Search, " "))
		}
		zones := func(s netip.AddrPort) bool { return strings.ContainsAny(s.Addr().Zone(), "#; \t\r\n") }
		if slices.ContainsFunc(conf.Servers, zones) {
			return
		}
		twice := resolvconf.Parse([]byte(again.String()))
		if !slices.Equal(conf.Servers, twice.Servers) || !slices.Equal(conf.Search, twice.Search) {
			t.Errorf("%q: %v %q, then %v %q", text, conf.Servers, conf.Search, twice.Servers, twice.Search)
		}
	})
}

// F6: servers at which the agent itself listens are removed.
func TestWithoutSelf(t *testing.T) {
	var local []netip.Addr
	for _, a := range []string{"127.0.0.1", "::1", "10.1.0.7", "2001:db8::7", "fe80::7", "fe80::8%eth0"} {
		local = append(local, netip.MustParseAddr(a))
	}
	for _, test := range []struct {
		listener string
		self     []string // servers to be removed
		others   []string // servers to be kept
	}{
		{"127.0.0.1:15053", nil, []string{"127.0.0.1", "10.1.0.7", "10.0.0.1"}},
		{"127.0.0.1:53", []string{"127.0.0.1"}, []string{"127.0.0.2", "::1", "10.1.0.7", "10.0.0.1"}},
		{"127.0.0.2:53", []string{"127.0.0.2"}, []string{"127.0.0.1"}},
		{"0.0.0.0:53", []string{"127.0.0.1", "127.0.0.53", "10.1.0.7", "0.0.0.0"}, []string{"10.0.0.1", "::1", "2001:db8::7"}},
		{
			"[::]:53", []string{"::1", "2001:db8::7", "fe80::7%eth1", "fe80::8%eth0", "::"},
			[]string{"127.0.0.1", "10.1.0.7", "2001:db8::1", "fe80::8%eth1", "fe80::1%eth0"},
		},
		{"[fe80::9%eth0]:53", []string{"fe80::9%eth0"}, []string{"fe80::9%eth1"}},
		{"[::ffff:10.1.0.7]:53", []string{"10.1.0.7"}, []string{"10.1.0.8"}},
	} {
		listeners := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:53"), netip.MustParseAddrPort(test.listener)}
		others, self := resolvconf.WithoutSelf(servers(slices.Concat(test.self, test.others)...), listeners, local)
		if !slices.Equal(others, servers(test.others...)) {
			t.Errorf("listening on %s: kept %v, want %v", test.listener, others, test.others)
		}
		if len(self) != len(test.self) {
			t.Errorf("listening on %s: removed %q, want %v", test.listener, self, test.self)
		}
		for i := range min(len(self), len(test.self)) {
			if !strings.Contains(self[i], servers(test.self[i])[0].String()+" is this agent: ") {
				t.Errorf("listening on %s: %q, want it to name %s", test.listener, self[i], test.self[i])
			}
		}
	}
}
