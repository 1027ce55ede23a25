package fakedns_test

import (
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A test that expects failures or forgeries is worth nothing if the nameserver is right all the time.
func TestEffectsAreOnTheWire(t *testing.T) {
	answer := fakedns.Answer("www.example. 60 IN A 192.0.2.1")
	s := fakedns.Start(t, answer)
	conn, err := dns.Dial("udp", s.Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask := func(replies int) (all []*dns.Msg) {
		query := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
		query.Id = 7
		if err := conn.WriteMsg(query); err != nil {
			t.Fatal(err)
		}
		for range replies {
			reply, err := conn.ReadMsg()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, reply)
		}
		return all
	}
	s.Handle(answer, fakedns.First(fakedns.WrongQuestion))
	replies := ask(2)
	if forged := replies[0]; forged.Question[0].Name == "www.example." {
		t.Errorf("no wrong question:\n%v", forged)
	}
	if right := replies[1]; right.Question[0].Name != "www.example." || len(right.Answer) != 1 {
		t.Errorf("after a wrong question:\n%v", right)
	}
	s.Handle(answer, fakedns.Drop)
	ask(0)
	wait.Until(t, "the query to be dropped", func() bool { return len(s.Queries()) == 2 })
	s.Handle(fakedns.Truncate(fakedns.Size(3000)))
	if replies := ask(1); !replies[0].Truncated || len(replies[0].Answer) > 0 {
		t.Errorf("want a truncated reply, and none to the dropped query:\n%v", replies[0])
	}
}
