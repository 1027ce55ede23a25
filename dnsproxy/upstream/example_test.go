package upstream_test

import (
	"fmt"
	"log"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// A printer prints the answer that it receives.
type printer struct {
	second upstream.Spec // the second nameserver
	done   chan struct{}
}

// Receive prints the answer. It is called once here: the first nameserver has failed, so nothing replaces the answer.
func (p printer) Receive(answer upstream.Answer, err error) {
	defer close(p.done)
	reply := new(dns.Msg)
	if err == nil {
		err = reply.Unpack(answer.Reply)
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(reply.Answer[0], "from the second server:", answer.Server == p.second.String())
}

// The first nameserver fails, so the query is sent to the second one at once.
func ExampleGroup_Start() {
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
	client := upstream.NewClient(upstream.Config{Timeout: time.Minute})
	defer client.Close()
	group := client.Group(specs, upstream.Options{})

	query, err := new(dns.Msg).SetQuestion("www.example.org.", dns.TypeA).Pack()
	if err != nil {
		log.Fatal(err)
	}
	p := printer{second: specs[1], done: make(chan struct{})}
	group.Start(query, upstream.UDPThenTCP, p)
	<-p.done
	// Output: www.example.org.	300	IN	A	203.0.113.80 from the second server: true
}
