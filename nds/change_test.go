package nds_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// hostsIn are the hosts of most tests here.
func hostsIn(p *plane) {
	for _, host := range []string{"a.example", "b.example", "c.example", "d.example", "e.example", "f.example"} {
		p.set(host, "192.0.2.1")
	}
}

// C11: a whole table, then changes of single hosts, each ACKed after it is in use.
func TestHostChanges(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, v nds.Variant) {
		t.Helper()
		p := startPlane(t)
		hostsIn(p)
		h, table := startHosts(t, p, variant(v))
		h.wantACK("v1")
		table.wantTable(t, p)
		if first := p.requests(); len(first) != 1 || first[0].merge != "hosts" || len(first[0].digests) > 0 || first[0].revision != "" {
			t.Errorf("first requests %+v", first)
		}
		h.wantStatus(func(s nds.Status) bool {
			return s.Mode == nds.ModeHosts && s.Digest == p.digest() && string(s.Revision) == "after v1" && s.Resources == 1 && s.Version == "v1"
		})
		p.set("a.example", "192.0.2.7")
		h.wantACK(p.push("a.example"))
		table.wantTable(t, p)
		p.set("New.example", "192.0.2.8") // as its author wrote it
		p.mu.Lock()
		p.entries["new.example"] = p.entries["New.example"]
		delete(p.entries, "New.example")
		p.mu.Unlock()
		p.remove("b.example")
		h.wantACK(p.push("new.example", "b.example"))
		got := table.entries(t)
		if _, there := got["New.example"]; !there || len(got) != 6 {
			t.Errorf("%d hosts: %v", len(got), got)
		}
		calls := table.calls()
		h.wantACK(p.push()) // changes nothing
		if table.calls() != calls {
			t.Error("an empty change was applied")
		}
		h.wantStatus(func(s nds.Status) bool {
			return s.Digest == p.digest() && string(s.Revision) == "after v4" && s.ChecksumDifferences == 0 && s.Rejected == 0
		})
		h.wantNothingApplied()
	})
}

// C11: a client that comes back says what it has, and is sent only the buckets that differ.
func TestResumeHosts(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, v nds.Variant) {
		t.Helper()
		for _, restart := range []bool{false, true} {
			p := startPlane(t)
			hostsIn(p)
			dir := t.TempDir()
			config := func(cfg *nds.Config) { cfg.Variant, cfg.StateDir = v, dir }
			h, table := startHosts(t, p, config)
			h.wantACK("v1")
			again := func() (first firstRequest) {
				n := len(p.requests())
				if restart {
					h.stop()
					h, table = startHosts(t, p, config)
				} else {
					p.server.CutStreams(nil)
				}
				wait.Until(t, "another stream", func() bool { return len(p.requests()) > n })
				first = p.requests()[n]
				h.wantACK("v" + string(rune('1'+n)))
				table.wantTable(t, p)
				h.wantStatus(func(s nds.Status) bool { return s.Digest == p.digest() && !s.Stale })
				return first
			}
			first := again()
			p.mu.Lock()
			buckets := p.bucketsLocked()
			p.mu.Unlock()
			if !slices.Equal(first.digests, buckets.Digests().Bytes()) || first.revision != "after v1" || len(first.sent) != 0 {
				t.Errorf("restart %v: the client says %+v", restart, first)
			}
			if calls := table.calls(); calls != 1 {
				t.Errorf("restart %v: applied %d times", restart, calls)
			}
			p.set("c.example", "192.0.2.9")
			if first = again(); first.revision != "after v2" || !slices.Equal(first.sent, []string{"c.example"}) {
				t.Errorf("restart %v: with another host %+v", restart, first)
			}
			p.remove("d.example")
			if first = again(); len(first.sent) != 0 {
				t.Errorf("restart %v: with a removed host %+v", restart, first)
			}
		}
	})
}

// D38, D41: a client sends the revision back only if it says of itself what it said when it was sent the table.
// Replicas compare what clients with the same revision have.
func TestRevisionOfAnotherNode(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	w, dir := newWorkload("10.0.0.1"), t.TempDir()
	config := func(cfg *nds.Config) {
		w.config(cfg)
		cfg.StateDir = dir
	}
	h, _ := startHosts(t, p, config)
	h.wantACK("v1")
	again := func(what string, disturb func(), sends bool) {
		t.Helper()
		n := len(p.requests())
		disturb()
		wait.Until(t, "another stream", func() bool { return len(p.requests()) > n })
		h.wantACK(fmt.Sprint("v", n+1))
		want := ""
		if sends {
			want = fmt.Sprint("after v", n)
		}
		if first := p.requests()[n]; first.revision != want || len(first.digests) == 0 || len(first.sent) > 0 {
			t.Errorf("%s: the client says %+v, want the revision %q", what, first, want)
		}
		h.wantStatus(func(s nds.Status) bool {
			return s.Connected && !s.Stale && string(s.Revision) == fmt.Sprint("after v", n+1)
		})
	}
	cut := func() { p.server.CutStreams(nil) }
	restart := func() {
		h.stop()
		h, _ = startHosts(t, p, config)
	}
	again("the stream ends", cut, true)
	again("another address", func() { w.set(nil, nil, "10.0.0.1", "fd00::1") }, false)
	again("the stream ends again", cut, true)
	again("a restart", restart, true)
	h.stop()
	w.set(nil, nil, "10.0.0.1")
	again("a restart with another address", restart, false)
	again("a restart with the same one", restart, true)
}

// C12, D41: a bit that changes on the way from the control plane is found before the host is in use. The client
// says which hosts, ends the stream, and asks for the bucket again.
func TestDamageOnTheWire(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, v nds.Variant) {
		t.Helper()
		p := startPlane(t)
		hostsIn(p)
		h, table := startHosts(t, p, variant(v))
		h.wantACK("v1")
		p.set("c.example", "192.0.2.9")
		p.damageNext()
		nack := h.wantAnswer(p.push("c.example"))
		if reason := nack.Rejection().GetMessage(); !strings.Contains(reason, "checksum") || !strings.Contains(reason, "host c.example") {
			t.Errorf("the reason is %q", reason)
		}
		h.wantACK("v3")
		table.wantTable(t, p)
		first := p.requests()
		if last := first[len(first)-1]; len(first) != 2 || !slices.Equal(last.sent, []string{"c.example"}) || last.revision != "after v1" {
			t.Errorf("the client came back with %+v", last)
		}
		if calls := table.calls(); calls != 2 {
			t.Errorf("applied %d times", calls)
		}
		h.wantStatus(func(s nds.Status) bool {
			return s.ChecksumDifferences == 1 && strings.Contains(s.LastChecksumDifference, "c.example") && s.Rejected == 1 && s.Digest == p.digest()
		})
	})
}

// C12, D41: the first table is not used either if it is damaged.
func TestDamagedFirstTable(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	p.damageNext()
	h, table := startHosts(t, p, nil)
	h.wantACK("v2")
	table.wantTable(t, p)
	if first := p.requests(); len(first) != 2 || len(first[1].digests) > 0 || table.calls() != 1 {
		t.Errorf("%d calls, streams %+v", table.calls(), first)
	}
}

// C12, D41: a bit that changes in the hosts that the client keeps is found when their shard changes, or
// at the latest when as many changes have come as there are shards, or with the next stream. The
// client names the host and is sent its bucket again.
func TestDamageInMemory(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		// offset is the byte to change in the entry of d.example.
		offset int
		// reconnect finds the damage in place of a change.
		reconnect bool
		named     string
	}{
		"address":            {offset: 25, named: "host d.example"},
		"key":                {offset: 5, named: "example"},
		"length":             {offset: 1, named: "bucket"},
		"tag":                {offset: 0, named: "bucket"},
		"address, at rest":   {offset: 25, named: "host d.example", reconnect: true},
		"length, at rest":    {offset: 1, named: "bucket", reconnect: true},
		"key field, at rest": {offset: 2, named: "bucket", reconnect: true},
	} {
		t.Run(name, func(t *testing.T) {
			p := startPlane(t)
			hostsIn(p)
			h, table := startHosts(t, p, nil)
			h.wantACK("v1")
			table.entries(t)["d.example"][tc.offset] ^= 4
			if tc.reconnect {
				p.server.CutStreams(nil)
			}
			for i := 0; !tc.reconnect && i <= fakeShards && h.client.Status().ChecksumDifferences == 0; i++ {
				p.set("a.example", "192.0.2.2", p.digest()[:4]) // something else
				h.wantAnswer(p.push("a.example"))
			}
			h.wantStatus(func(s nds.Status) bool {
				return s.ChecksumDifferences == 1 && s.Digest == p.digest() && s.Connected && len(p.requests()) == 2
			})
			table.wantTable(t, p)
			if last := h.client.Status().LastChecksumDifference; !strings.Contains(last, "changed in memory") || !strings.Contains(last, tc.named) {
				t.Errorf("the difference is %q", last)
			}
			first := p.requests()
			if last := first[len(first)-1]; len(first) != 2 || len(last.digests) == 0 || last.revision != "" { // it does not have what it was sent
				t.Errorf("streams %+v", first)
			}
			p.set("e.example", "192.0.2.4")
			h.wantACK(p.push("e.example"))
			table.wantTable(t, p)
		})
	}
}

// C12, D41: a bit that has changed in memory is found before its shard is written anew, with another host: the
// checksum of the shard would hide it from then on.
func TestDamageBesideAChange(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	h, table := startHosts(t, p, nil)
	other := ""
	for i := 0; other == ""; i++ {
		if host := fmt.Sprintf("x%d.example", i); table.ShardOf(host) == table.ShardOf("d.example") {
			other = host
		}
	}
	if table.ShardOf("d.example") == 0 {
		t.Fatal("the first change checks shard 0 in any case")
	}
	h.wantACK("v1")
	table.entries(t)["d.example"][25] ^= 4
	p.set(other, "192.0.2.1")
	if reason := h.wantAnswer(p.push(other)).Rejection().GetMessage(); !strings.Contains(reason, "changed in memory: of host d.example") {
		t.Errorf("the reason is %q", reason)
	}
	h.wantACK("v3")
	table.wantTable(t, p)
}

// C12, D41: a table in use that has changed in memory is built anew, with a change when the turn of its shard
// comes, or with the next stream.
func TestDamageInUse(t *testing.T) {
	t.Parallel()
	for _, reconnect := range []bool{false, true} {
		t.Run(fmt.Sprintf("reconnect %v", reconnect), func(t *testing.T) {
			p := startPlane(t)
			hostsIn(p)
			h, table := startHosts(t, p, nil)
			h.wantACK("v1")
			table.mu.Lock()
			table.damaged = table.ShardOf("d.example")
			table.shards[table.damaged] = nil
			table.mu.Unlock()
			if reconnect {
				p.server.CutStreams(nil)
			}
			for i := 0; !reconnect && i < fakeShards && h.client.Status().ChecksumDifferences == 0; i++ {
				p.set("a.example", "192.0.2.2", p.digest()[:4])
				h.wantACK(p.push("a.example"))
			}
			wait.Until(t, "a table that is intact", func() bool { return !table.Damaged(table.ShardOf("d.example")) })
			h.wantStatus(func(s nds.Status) bool {
				return s.ChecksumDifferences == 1 && strings.Contains(s.LastChecksumDifference, "table in use") && s.Rejected == 0 && s.Digest == p.digest()
			})
			table.wantTable(t, p)
		})
	}
}

// C3, C11: a malformed change is NACKed, the table stays, and so does the stream.
func TestMalformedChange(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, v nds.Variant) {
		t.Helper()
		p := startPlane(t)
		hostsIn(p)
		h, table := startHosts(t, p, variant(v))
		h.wantACK("v1")
		entry := entryOf(t, "a.example", &api.NameTable_NameInfo{Ips: []string{"192.0.2.3"}})
		upper := entryOf(t, "A.example", &api.NameTable_NameInfo{Ips: []string{"192.0.2.3"}})
		sum := make([]byte, digest.SumSize)
		for _, tc := range []struct {
			entries []byte
			change  *api.NameTable_Change
			want    string
		}{
			{nil, &api.NameTable_Change{}, "checksum of 0 bytes"},
			{nil, &api.NameTable_Change{Sum: sum, Complete: []byte{1}}, "complete"},
			{slices.Concat(entry, upper), &api.NameTable_Change{Sum: sum}, `host "a.example" twice`},
			{[]byte{0x0a, 2, 0x0a, 5}, &api.NameTable_Change{Sum: sum}, "unexpected EOF"},
		} {
			p.mu.Lock()
			p.version++
			delta, state := p.compose(tc.entries, tc.change, "bad "+tc.want)
			p.mu.Unlock()
			reason := h.wantAnswer(p.server.PushResponses(delta, state)).Rejection().GetMessage()
			if !strings.Contains(reason, tc.want) {
				t.Errorf("the reason is %q, want %q", reason, tc.want)
			}
		}
		delta, state := p.compose(nil, &api.NameTable_Change{Sum: sum}, "beside another")
		delta.Resources = append(delta.Resources, &discoveryv3.Resource{Name: "other", Resource: delta.GetResources()[0].GetResource()})
		state.Resources = append(state.Resources, &anypb.Any{TypeUrl: nds.TypeURL})
		if reason := h.wantAnswer(p.server.PushResponses(delta, state)).Rejection().GetMessage(); !strings.Contains(reason, "want it alone") {
			t.Errorf("the reason is %q", reason)
		}
		table.mu.Lock()
		table.err = errors.New("refused by the table")
		table.mu.Unlock()
		p.set("b.example", "192.0.2.4")
		if reason := h.wantAnswer(p.push("b.example")).Rejection().GetMessage(); reason != "refused by the table" {
			t.Errorf("the reason is %q", reason)
		}
		h.wantACK(p.push("b.example"))
		table.wantTable(t, p)
		if first := p.requests(); len(first) != 1 || h.client.Status().ChecksumDifferences != 0 {
			t.Errorf("%d streams", len(first))
		}
	})
}

// C11: a client that has not asked for changes refuses them.
func TestChangeNotAskedFor(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	h := start(t, options{server: p.server})
	if reason := h.wantAnswer("v1").Rejection().GetMessage(); !strings.Contains(reason, "not asked for") {
		t.Errorf("the reason is %q", reason)
	}
	h.wantNothingApplied()
}

// C11: control planes of both kinds follow each other. The table of one replaces that of the other,
// and a client says what it has only if it came as changes.
func TestOtherControlPlane(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, v nds.Variant) {
		t.Helper()
		p := startPlane(t)
		hostsIn(p)
		dir := t.TempDir()
		config := func(cfg *nds.Config) { cfg.Variant, cfg.StateDir = v, dir }
		h, _ := startHosts(t, p, config)
		h.wantACK("v1")

		p.mu.Lock()
		p.away = true // what answers now is istiod
		p.mu.Unlock()
		whole := hosts("istio.example")
		p.server.Push(whole)
		h.wantApplied(plain(t, whole))
		h.wantStatus(func(s nds.Status) bool {
			return s.Mode == nds.ModeWhole && s.Digest == "" && s.Revision == nil && s.Resources == 1
		})
		p.server.CutStreams(nil)
		wait.Until(t, "another stream", func() bool { return len(p.requests()) == 2 })
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Pushes == 3 })
		if last := p.requests()[1]; last.merge != "hosts" || len(last.digests) > 0 || last.revision != "" {
			t.Errorf("after a whole table the client says %+v", last)
		}
		h.wantNothingApplied() // the same again

		h.stop() // over a restart
		h, table := startHosts(t, p, config)
		h.wantApplied(plain(t, whole))
		p.mu.Lock()
		p.away = false
		p.mu.Unlock()
		p.server.CutStreams(nil)
		wait.Until(t, "the hosts are back", func() bool { return h.client.Status().Mode == nds.ModeHosts })
		table.wantTable(t, p)
		first := p.requests()
		if last := first[len(first)-1]; len(last.digests) > 0 || len(last.sent) != 6 {
			t.Errorf("a table of istiod has no checksums: %+v", last)
		}
		h.stop()
		h, table = startHosts(t, p, config)
		h.wantStatus(func(s nds.Status) bool { return s.Mode == nds.ModeHosts && s.Connected && !s.Stale })
		table.wantTable(t, p)
		h.wantNothingApplied()
	})
}

// C11: a control plane that removes the last host is followed, with a warning.
func TestNoHostsLeft(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	p.set("a.example", "192.0.2.1")
	h, table := startHosts(t, p, nil)
	h.wantACK("v1")
	p.remove("a.example")
	h.wantACK(p.push("a.example"))
	h.wantLog("level=WARN", "no mesh hosts")
	table.wantTable(t, p)
}
