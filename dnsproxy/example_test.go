package dnsproxy_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// startExample starts a server with the search list of a pod in the namespace shop and the
// nameservers of upstreams. The function that it returns ends the server.
func startExample(upstreams ...upstream.Spec) (server *dnsproxy.Server, stop func()) {
	dir, err := os.MkdirTemp("", "dnsproxy-example-")
	if err != nil {
		log.Fatal(err)
	}
	resolvConf := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolvConf, []byte("search shop.svc.cluster.local svc.cluster.local\n"), 0o600); err != nil {
		log.Fatal(err)
	}
	server, err = dnsproxy.New(dnsproxy.Config{
		Addr:      "127.0.0.1:0",
		Namespace: "shop",
		Forward:   forward.Config{ResolvConf: resolvConf, Upstreams: upstreams, Timeout: time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- server.Run(ctx) }()
	<-server.Ready()
	return server, func() {
		cancel()
		if err := <-done; err != nil {
			log.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			log.Fatal(err)
		}
	}
}

// loadExample loads a table with a Service and an external host.
func loadExample(server *dnsproxy.Server) {
	push, err := proto.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"cart.shop.svc.cluster.local": {Registry: "Kubernetes", Shortname: "cart", Namespace: "shop", Ips: []string{"10.96.10.12"}},
		"db.example.com":              {Registry: "External", Ips: []string{"192.0.2.53"}},
	}})
	if err != nil {
		log.Fatal(err)
	}
	shards, err := digest.Split(push)
	if err != nil {
		log.Fatal(err)
	}
	if err := server.Load(shards); err != nil {
		log.Fatal(err)
	}
}

// ask sends a query for the IPv4 addresses of a name and prints the answer.
func ask(server *dnsproxy.Server, name string) {
	client := dns.Client{Timeout: time.Hour}
	reply, _, err := client.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), server.Addrs()[0].Address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(name, dns.RcodeToString[reply.Rcode])
	for _, record := range reply.Answer {
		fmt.Println(" ", record)
	}
}

// A server answers the hosts of its table. If a client has appended a search domain to the
// name of a host, the answer has a CNAME and the addresses.
func Example() {
	server, stop := startExample()
	defer stop()
	loadExample(server)

	ask(server, "cart.shop.svc.cluster.local.")
	ask(server, "db.example.com.shop.svc.cluster.local.")
	// Output:
	// cart.shop.svc.cluster.local. NOERROR
	//   cart.shop.svc.cluster.local.	30	IN	A	10.96.10.12
	// db.example.com.shop.svc.cluster.local. NOERROR
	//   db.example.com.shop.svc.cluster.local.	30	IN	CNAME	db.example.com.
	//   db.example.com.	30	IN	A	192.0.2.53
}

// A server forwards the names that its table does not have.
func Example_forward() {
	nameserver, err := fakedns.Listen(fakedns.Answer("www.example.org. 300 IN A 203.0.113.80"))
	if err != nil {
		log.Fatal(err)
	}
	defer nameserver.Close()
	server, stop := startExample(upstream.Spec{Addr: nameserver.Addr})
	defer stop()
	loadExample(server)

	ask(server, "www.example.org.")
	// Output:
	// www.example.org. NOERROR
	//   www.example.org.	300	IN	A	203.0.113.80
}

// Explain names the rows of docs/behaviour.md that decide about a query.
func ExampleServer_Explain() {
	server, stop := startExample()
	defer stop()
	loadExample(server)

	for _, name := range []string{"cart.", "db.example.com.shop.svc.cluster.local.", "www.example.org."} {
		explanation, err := server.Explain(name, "A")
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s %v: %s\n", name, explanation.Rows, explanation.Why)
	}
	// Output:
	// cart. [N2 A1]: in the mesh table: short name of cart.shop.svc.cluster.local
	// db.example.com.shop.svc.cluster.local. [N5 N1 A1]: in the mesh table: after removing the search domain shop.svc.cluster.local.: the host's FQDN
	// www.example.org. [N9]: not in the mesh table: forwarded
}
