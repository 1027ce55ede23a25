package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

func TestResolver(t *testing.T) {
	u, addr := startTestUpstream(t)
	hosts := []host{{name: "one." + strings.TrimSuffix(externalDomain, ".")}, {name: "two." + strings.TrimSuffix(externalDomain, ".")}}
	const queries = 20
	for i, m := range manners() {
		r, err := newResolver(addr, mixes()[0], hosts)
		if err != nil {
			t.Fatal(err)
		}
		defer r.close()
		for range queries {
			if took, err := r.ask(m); err != nil || took <= 0 {
				t.Fatalf("%v, %v", took, err)
			}
		}
		if got, want := u.asked.Load(), int64((i+1)*queries); got != want {
			t.Errorf("%s: asked %d times, want %d", m.what, got, want)
		}
		if open := r.socket >= 0; open == m.fresh {
			t.Errorf("%s: a socket is left open: %v", m.what, open)
		}
	}
}

func TestResolverWantsRecords(t *testing.T) {
	_, addr := startTestUpstream(t)
	for name, why := range map[string]string{"www.other": "NXDOMAIN", clusterDomain + "." + externalDomain: ""} {
		r, err := newResolver(addr, mixes()[0], []host{{name: name}})
		if err != nil {
			t.Fatal(err)
		}
		defer r.close()
		if _, err := r.ask(manners()[0]); (err == nil) != (why == "") || err != nil && !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", name, err)
		}
	}
	query := new(dns.Msg).SetQuestion("www.", dns.TypeA)
	message := func(m *dns.Msg) []byte {
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return wire
	}
	other := new(dns.Msg).SetReply(query)
	other.Id++
	for what, reply := range map[string][]byte{
		"no records": message(new(dns.Msg).SetReply(query)), "other ID": message(other), "a query": message(query), "nothing": nil,
	} {
		if looksRight(message(query), reply) == nil {
			t.Errorf("%s is taken for an answer", what)
		}
	}
}

// Rules cannot be installed in the namespace of the machine.
func TestOwnNamespace(t *testing.T) {
	if inOwnNamespace() == nil {
		t.Error("the machine's namespace is taken for one of our own")
	}
	outside, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	inside := ""
	err = inNetspace(func() error {
		var err error
		inside, err = os.Readlink("/proc/thread-self/ns/net")
		return errors.Join(err, inOwnNamespace())
	})
	if errors.Is(err, unix.EPERM) {
		t.Skip("LEFT OUT: making a network namespace, it needs root")
	}
	if err != nil || inside == "" || inside == outside {
		t.Errorf("namespace %q, outside %q: %v", inside, outside, err)
	}
	if after, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || after != outside {
		t.Errorf("namespace %q afterwards: %v", after, err)
	}
}

func TestOneByOne(t *testing.T) {
	got := oneByOne(`*nat
:NAMETAP_OUTPUT - [0:0]
-I OUTPUT 1 -p udp -m udp --dport 53 -m comment --comment "nametap: DNS over UDP" -j NAMETAP_OUTPUT
COMMIT
*raw
-A NAMETAP_OUTPUT -p udp -j CT --zone-orig 53
COMMIT
`)
	want := [][]string{
		{"-t", "nat", "-N", "NAMETAP_OUTPUT"},
		strings.Split("-t,nat,-I,OUTPUT,1,-p,udp,-m,udp,--dport,53,-m,comment,--comment,nametap: DNS over UDP,-j,NAMETAP_OUTPUT", ","),
		strings.Fields("-t raw -A NAMETAP_OUTPUT -p udp -j CT --zone-orig 53"),
	}
	if !slices.EqualFunc(got, want, slices.Equal[[]string]) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAskedFigures(t *testing.T) {
	a := asked{agent: 40 * time.Microsecond, client: 20 * time.Microsecond}
	for _, micros := range []int{9, 1, 2, 5} {
		a.took = append(a.took, time.Duration(micros)*time.Microsecond)
	}
	f := figures{}
	a.enter(f, 0)
	for name, want := range map[string]float64{captureAgent: 10, captureBoth: 15, latencyP50: 5, latencyP99: 9} {
		if got := f[name].median(); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
