package soak

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/nametap/nametap/test/machines/load"
)

// lossRate is how many queries a second are forwarded while packets are lost.
const lossRate = 200

// loss is a table of nftables that loses one packet of 100 that comes from the other namespace.
const loss = `table inet loss {
	chain in {
		type filter hook input priority 0
		iif eth0 numgen random mod 100 0 drop
	}
}
`

// TestNoProblemWithLoss checks that the agent finds no problem, and `nametap doctor` says nothing, while one packet of
// 100 is lost on the way to the nameservers and the control plane, and one on the way back.
func TestNoProblemWithLoss(t *testing.T) { // R15
	w := newWorld(t)
	levels := w.begin()
	w.host.Pipe(loss, "nft", "-f", "-")
	w.network.Pipe(loss, "nft", "-f", "-")
	l, err := load.Start(load.Config{
		Server: netip.AddrPortFrom(netip.MustParseAddr(a4), 53), Rate: lossRate, Seed: *seed, Enter: w.host.Run,
		Expect: &load.Expectation{Questions: []load.Question{{Name: "*.unique.example", Weight: 1, Check: checkForwarded}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	t.Setenv("RUNTIME_DIRECTORY", filepath.Join(w.dir, "run"))
	doctor := []string{"doctor", "--status-addr", statusAddr, "--resolv-conf", w.resolvConf}
	second := time.NewTicker(time.Second)
	defer second.Stop()
	answers := 0
	for began := time.Now(); time.Since(began) < *duration/2; <-second.C {
		text, err := levels.get("/healthz/ready")
		if err != nil {
			continue // the machine is busy
		}
		answers++
		if text != "ready\n" {
			t.Fatalf("after %v the agent says: %s", time.Since(began), text)
		}
	}
	if least := int(duration.Seconds() / 4); answers < least {
		t.Errorf("the agent has answered %d times, want %d", answers, least)
	}
	if err := w.exec(t.Context(), "", filepath.Join(w.bin, "nametap"), doctor...); err != nil {
		t.Error(err)
	}
	retries := 0.0
	for _, server := range []string{a4, a6, b4} {
		retries += levels.metric(`nametap_upstream_hedges_total{upstream="` + server + `"}`)
	}
	t.Logf("%v; %v retries", l.Stop(), retries)
	if retries <= 0 {
		t.Errorf("%v queries were sent again: no packet was lost", retries)
	}
}
