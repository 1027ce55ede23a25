package egress

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/table"
)

// routes returns the settings of a server whose table has hosts.
func routes(t *testing.T, hosts map[string]*api.NameTable_NameInfo) *Config {
	t.Helper()
	whole, err := proto.Marshal(&api.NameTable{Table: hosts})
	if err != nil {
		t.Fatal(err)
	}
	shards, err := digest.Split(whole)
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := table.NewCluster("shop", "cluster.local")
	built, loadErr := table.Empty(cluster).With(shards)
	if err = errors.Join(err, loadErr); err != nil {
		t.Fatal(err)
	}
	return &Config{Table: func() *table.Table { return built }}
}

func external(vip string, ports ...*api.NameTable_Destination) *api.NameTable_NameInfo {
	return &api.NameTable_NameInfo{Ips: []string{vip}, Registry: "External", Destinations: ports}
}

// E1, E2, E3, E6, E7: from a VIP, a port and a name to a host and a port.
func TestRoutes(t *testing.T) {
	t.Parallel()
	cfg := routes(t, map[string]*api.NameTable_NameInfo{
		"a.example.com":      external("240.240.0.1", &api.NameTable_Destination{Port: 80, Target: 8080}, &api.NameTable_Destination{Port: 25, Endpoints: []string{"10.0.0.1:2525"}}),
		"b.example.com":      external("240.240.0.2"),
		"*.example.org":      external("240.240.0.3"),
		"*.deep.example.org": external("240.240.0.4"),
		"c.deep.example.org": external("240.240.0.4"),
		"*.example.net":      external("240.240.0.4", &api.NameTable_Destination{Port: 443}),
	})
	for route, want := range map[string]string{
		"240.240.0.1:80":                      "a.example.com to a.example.com:8080",
		"240.240.0.1:25":                      "a.example.com to 10.0.0.1:2525",
		"240.240.0.1:81":                      "port: a.example.com port 81: the host has only the ports 25, 80",
		"240.240.0.2:81":                      "b.example.com to b.example.com:81",
		"240.240.0.9:80":                      "no_host: no host of the table has the address 240.240.0.9",
		"240.240.0.3:80":                      "needs a name",
		"240.240.0.3:80 x.example.org":        "*.example.org to x.example.org:80",
		"240.240.0.3:80 X.Y.Example.Org":      "*.example.org to x.y.example.org:80",
		"240.240.0.3:80 example.org":          "other_name: *.example.org (240.240.0.3:80): the client said \"example.org\", which is no host of this address",
		"240.240.0.3:80 a..b":                 "other_name: *.example.org (240.240.0.3:80): the client said \"a..b\", which is not a hostname",
		"240.240.0.4:443 x.deep.example.org":  "*.deep.example.org to x.deep.example.org:443",
		"240.240.0.4:443 c.deep.example.org":  "c.deep.example.org to c.deep.example.org:443",
		"240.240.0.4:443 x.example.net":       "*.example.net to x.example.net:443",
		"240.240.0.4:22 c.deep.example.org":   "c.deep.example.org to c.deep.example.org:22",
		"240.240.0.4:22 x.example.net":        "port: *.example.net port 22: the host has only the ports 443",
		"240.240.0.4:443 x.c.deep.exampl.org": "other_name: ",
	} {
		if got := follow(cfg, route); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", route, got, want)
		}
	}
}

// follow returns where VIP:PORT [NAME] leads, or why not.
func follow(cfg *Config, text string) string {
	vip, said, _ := strings.Cut(text, " ")
	explain := func(err error) string {
		if r, ok := errors.AsType[*refusal](err); ok {
			return string(r.reason) + ": " + err.Error()
		}
		return err.Error()
	}
	r, err := routeTo(netip.MustParseAddrPort(vip), cfg)
	if err != nil {
		return explain(err)
	}
	name, exact := r.exact()
	if !exact {
		if said == "" {
			return "needs a name"
		}
		if name, err = r.check(said); err != nil {
			return explain(err)
		}
	}
	h := r.hostOf(name)
	if h.refused != nil {
		return explain(h.refused)
	}
	return hostText(h.name) + " to " + h.targets(hostText(name))[0].String()
}
