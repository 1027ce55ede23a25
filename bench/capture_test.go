package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/bench/report"
)

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
	f := report.Figures{}
	a.enter(f, 0)
	for name, want := range map[string]float64{captureAgent: 10, captureBoth: 15, latencyP50: 5, latencyP99: 9} {
		if got := f[name].Median(); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}
