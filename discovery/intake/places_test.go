package intake

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// pass lets time pass.
func pass(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // the bubble's clock

// A member of a group holds as much as it may, and takes as much again within a minute. Others do not matter to it.
func TestGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[string](4)
		taken := func(of string) (n int) {
			for g.Take(of) {
				n++
			}
			return n
		}
		give := func(of string, n int) {
			for range n {
				g.Give(of)
			}
		}
		want := func(of string, n int) {
			t.Helper()
			if got := taken(of); got != n {
				t.Errorf("%s took %d, want %d", of, got, n)
			}
		}
		want("a", 4)
		pass(time.Hour)
		want("a", 0)
		want("b", 4)
		give("b", 4)
		want("b", 0)
		pass(15*time.Second + time.Millisecond)
		want("b", 1)
		give("a", 3)
		want("a", 3)
		give("a", 3)
		pass(time.Hour)
		want("a", 3)
	})
}

// Members that hold nothing are forgotten.
func TestGroupForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[int](1)
		for i := range 10 * minSweep {
			if !g.Take(i) {
				t.Fatal("there is no place for a new member")
			}
			if i > 0 {
				g.Give(i)
			}
			pass(time.Second)
		}
		if n := len(g.members); n > 2*minSweep {
			t.Errorf("%d members are known", n)
		}
		if g.Take(0) {
			t.Error("a member that holds something was forgotten")
		}
	})
}

// D62: an address, a namespace, and all clients in plaintext, leave places to others.
func TestPlaces(t *testing.T) {
	address := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}) }
	p := NewPlaces(8, 3)
	var places []*Place
	enter := func(at int, take func(*Place) error) error {
		place, err := p.Enter(address(at))
		if err != nil {
			return err
		}
		if err := take(place); err != nil {
			place.Leave()
			return err
		}
		places = append(places, place)
		return nil
	}
	want := func(err error, refusal string) {
		t.Helper()
		switch {
		case refusal == "" && err != nil:
			t.Error(err)
		case refusal != "" && (status.Code(err) != codes.ResourceExhausted || !strings.Contains(fmt.Sprint(err), refusal)):
			t.Errorf("got %v, want ResourceExhausted with %q", err, refusal)
		}
	}
	unproven := func(p *Place) error { return p.Unproven(true) }
	alone := func(p *Place) error { return p.Unproven(false) }
	proven := func(namespace string) func(p *Place) error { return func(p *Place) error { return p.Prove(namespace) } }
	for range 3 {
		want(enter(1, unproven), "")
	}
	want(enter(1, unproven), "--max-clients-per-address")
	want(enter(2, unproven), "")
	want(enter(2, unproven), "in plaintext")
	for i := range 3 {
		want(enter(10+i, proven("shop")), "")
	}
	want(enter(10, proven("data")), "")
	want(enter(11, proven("data")), "serves 8 clients")
	want(enter(12, proven("shop")), "serves 8 clients")
	for _, place := range places[:4] {
		place.Leave()
	}
	places = places[4:]
	want(enter(20, proven("shop")), "")
	want(enter(20, proven("shop")), `"shop"`)
	for range 3 {
		want(enter(21, alone), "")
	}
	want(enter(20, alone), "serves 8 clients")
	for _, place := range places {
		place.Leave()
	}
	if p.open != 0 || p.unproven != 0 {
		t.Errorf("%d places are taken, %d of them unproven", p.open, p.unproven)
	}
}
