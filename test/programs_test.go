package test

import (
	"flag"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"
	_ "google.golang.org/grpc/balancer/grpclb" // with which the resolver asks for SRV, too
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/serviceconfig"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

var wantedNames = flag.String("lookup", "", "names that TestLookup looks up")

// TestPrograms lets real resolvers look names up on a VM and in a pod, while the nameserver is silent, refuses, and has
// no names.
func TestPrograms(t *testing.T) { // N2, N4, N5, N9, A6
	t.Parallel()
	h := newHost(t)
	web := &api.NameTable_NameInfo{Ips: []string{"10.1.0.1"}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"}
	web.Ports = []*api.NameTable_Port{{Name: "grpc", Number: 80}}
	h.xds.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.shop.svc.cluster.local": web, "*.wild.example": {Ips: []string{"10.1.0.3"}, Registry: "External"},
	}})
	for _, compiler := range []string{"gcc", "musl-gcc"} {
		h.Exec(compiler, "-o", filepath.Join(h.dir, compiler), "testdata/lookup.c")
	}
	h.redirect()
	const names = "web web.shop web.shop.svc web.shop.svc.cluster.local"
	for _, search := range []string{
		"corp.example wild.example\n", "shop.svc.cluster.local svc.cluster.local cluster.local corp.example wild.example\noptions ndots:5\n",
	} {
		conf := "nameserver " + named + "\nsearch " + search
		h.resolvConf = h.write("resolv.conf", conf)
		for more, handler := range map[string]fakedns.Handler{
			"": fakedns.Silence, "www.example.org": fakedns.Rcode(dns.RcodeServerFailure), "a.wild.example": fakedns.Answer(),
		} {
			h.named.Handle(handler)
			h.named.Reset()
			a := h.start("--namespace=shop", "--upstream-timeout=1h")
			want := strings.Repeat("web.shop.svc.cluster.local 10.1.0.1\n", 4)
			for _, compiler := range []string{"musl-gcc", "gcc"} { // musl asks again after REFUSED, for long
				asked := names
				if compiler == "gcc" && more != "" {
					asked += " " + more
					want += map[string]string{"www.example.org": "none\n", "a.wild.example": "a.wild.example 10.1.0.3\n"}[more]
				}
				got := h.client(conf, append([]string{filepath.Join(h.dir, compiler)}, strings.Fields(asked)...)...)
				if got != want {
					t.Errorf("%s %s: %q, want %q", compiler, asked, got, want)
				}
			}
			h.client(conf, "timeout", "60", os.Args[0], "-lookup="+names, "-test.run=^TestLookup$")
			for _, q := range h.named.Queries() {
				if strings.Contains(q.Name, "web.shop.svc.cluster.local.") {
					t.Errorf("the nameserver was asked for %s", q.Name)
				}
			}
			a.end(terminate)
		}
	}
}

// TestLookup is a program of TestPrograms: it looks names up as gRPC does, by Go's resolver.
func TestLookup(t *testing.T) {
	for _, name := range strings.Fields(*wantedNames) {
		found := make(watcher, 1)
		target := resolver.Target{URL: url.URL{Scheme: "dns", Path: "/" + name + ":80"}}
		r, err := resolver.Get("dns").Build(target, found, resolver.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if state := <-found; len(state.Addresses) != 1 || state.Addresses[0].Addr != "10.1.0.1:80" {
			t.Errorf("%s: %v", name, state)
		}
		r.Close()
	}
}

// A watcher receives what a resolver of gRPC finds, also an error, as an empty state.
type watcher chan resolver.State

func (w watcher) UpdateState(s resolver.State) error { w <- s; return nil }
func (w watcher) ReportError(error)                  { w <- resolver.State{} }
func (w watcher) NewAddress([]resolver.Address)      {}
func (w watcher) ParseServiceConfig(string) *serviceconfig.ParseResult {
	return new(serviceconfig.ParseResult)
}
