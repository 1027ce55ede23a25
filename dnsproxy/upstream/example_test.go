package upstream_test

import (
	"context"
	"fmt"
	"log"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// The first nameserver fails, so the query is sent to the second one at once.
func ExampleGroup_Exchange() {
	var specs []upstream.Spec
	for _, handler := range []fakedns.Handler{
		fakedns.Rcode(dns.RcodeServerFailure),
		fakedns.Answer("www.example.org. 300 IN A 203.0.113.80"),
	} {
		nameserver, err := fakedns.Listen(handler)
		if err != nil {
			log.Fatal(err)
		}
		defer nameserver.Close()
		specs = append(specs, upstream.Spec{Addr: nameserver.Addr})
	}
	client := upstream.NewClient(upstream.Config{})
	defer client.Close()
	group := client.Group(specs, upstream.Options{})

	query, err := new(dns.Msg).SetQuestion("www.example.org.", dns.TypeA).Pack()
	if err != nil {
		log.Fatal(err)
	}
	answer, server, err := group.Exchange(context.Background(), query, upstream.UDPThenTCP)
	if err != nil {
		log.Fatal(err)
	}
	reply := new(dns.Msg)
	if err := reply.Unpack(answer); err != nil {
		log.Fatal(err)
	}
	fmt.Println(reply.Answer[0], "from the second server:", server == specs[1].String())
	// Output: www.example.org.	300	IN	A	203.0.113.80 from the second server: true
}
