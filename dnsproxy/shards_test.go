package dnsproxy_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// byShard returns the entries of hosts by shard, without empty shards.
func byShard(tb testing.TB, h hosts) map[int][]byte {
	tb.Helper()
	shards := map[int][]byte{}
	for host, info := range h {
		at := digest.ShardOf(host)
		shards[at] = append(shards[at], hosts{host: info}.wire(tb)...)
	}
	return shards
}

// with loads the shards of these hosts, which have no other hosts.
func (p *proxy) with(tb testing.TB, h hosts) {
	tb.Helper()
	if err := p.Load(byShard(tb, h)); err != nil {
		tb.Fatal(err)
	}
}

// Shards of the table are replaced one by one, before a whole table and after one. The others stay.
func TestLoadShards(t *testing.T) { // C11
	t.Parallel()
	var log bytes.Buffer
	fake := nameserver(t, fakedns.Answer())
	p := start(t, dnsproxy.Config{
		Logger: slog.New(slog.NewTextHandler(&log, nil)), Forward: forward.Config{Upstreams: servers(fake)},
	})
	p.with(t, hosts{
		"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1"), "api.example": external("10.0.0.2"), "bad..example": external("10.0.0.3"),
	})
	<-p.Synced()
	p.converse(t, []dialogue{{"web A", webAddress}, {"api.example A", "api.example. A 10.0.0.2"}})
	if got := strings.Count(log.String(), "left out"); got != 1 {
		t.Errorf("%d entries logged:\n%s", got, log.String())
	}
	p.with(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.9")})
	p.converse(t, []dialogue{
		{"web A", "web. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.9"}, {"api.example A", "api.example. A 10.0.0.2"},
		{"9.0.0.10.in-addr.arpa PTR", "9.0.0.10.in-addr.arpa. PTR web.shop.svc.cluster.local."}, {"1.0.0.10.in-addr.arpa PTR", forwarded},
	})
	if got := strings.Count(log.String(), "left out"); got != 1 {
		t.Errorf("%d entries logged after a change of another shard:\n%s", got, log.String())
	}
	current := p.Table()
	for name, bad := range map[string][]byte{
		"not UTF-8":     {0x0a, 8, 0x0a, 1, 'x', 0x12, 3, 0x0a, 1, 0xff},
		"another shard": hosts{"api.example": external("10.0.0.2")}.wire(t),
		"cut":           {0x0a, 8},
	} {
		at := digest.ShardOf("x")
		if name == "another shard" {
			at = (digest.ShardOf("api.example") + 1) % digest.Count
		}
		if err := p.Load(map[int][]byte{at: bad}); err == nil || p.Table() != current {
			t.Errorf("%s: %v", name, err)
		}
	}
	p.with(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.9")})
	if p.Table() != current {
		t.Error("an unchanged shard makes another table")
	}
	p.load(t, hosts{"api.example": external("10.0.0.4")})
	p.converse(t, []dialogue{{"web A", forwarded}, {"api.example A", "api.example. A 10.0.0.4"}})
}
