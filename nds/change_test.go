package nds_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/birthday"
	"github.com/nametap/nametap/internal/testkit/fakexds"
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
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlaneWith(t, plane)
		hostsIn(p)
		h, table := startHosts(t, p, nil)
		h.wantACK("v1")
		table.wantTable(t, p)
		if first := p.requests(); len(first) != 1 || first[0].merge != "hosts" || len(first[0].digests) > 0 || first[0].revision != "" {
			t.Errorf("first requests %+v", first)
		}
		h.wantStatus(func(s nds.Status) bool {
			return s.Mode == nds.ModeHosts && s.Digest == p.digest() && string(s.Revision) == "after v1" && s.Version == "v1"
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
	})
}

// C11: a client that comes back says what it has, and is sent only the shards that differ.
func TestResumeHosts(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		for _, restart := range []bool{false, true} {
			p := startPlaneWith(t, plane)
			hostsIn(p)
			dir := t.TempDir()
			config := stateDir(dir)
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
			sums := p.sumsLocked()
			p.mu.Unlock()
			if !slices.Equal(first.digests, sums.Digests().Bytes()) || first.revision != "after v1" || len(first.sent) != 0 {
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
	w, dir, version := newWorkload("10.0.0.1"), t.TempDir(), "v0.1.0"
	config := func(cfg *nds.Config) {
		w.config(cfg)
		cfg.StateDir, cfg.Node.Version = dir, version
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
	version = "v0.2.0"
	again("an upgrade of the agent", restart, true)
}

// C12, D41: a bit that changes on the way from the control plane is found before the host is in use. The client
// says which hosts, ends the stream, and asks for the shard again.
func TestDamageOnTheWire(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlaneWith(t, plane)
		hostsIn(p)
		h, table := startHosts(t, p, nil)
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

// D41: a host that is not what the control plane has sent, whatever the reason, is noticed when it changes. The client
// then says what it has, and is sent it again.
func TestAnotherHostThanWasSent(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	h, table := startHosts(t, p, nil)
	h.wantACK("v1")
	table.entries(t)["d.example"][25] ^= 4
	p.set("d.example", "192.0.2.2")
	if reason := h.wantAnswer(p.push("d.example")).Rejection().GetMessage(); !strings.Contains(reason, "host d.example") {
		t.Errorf("the reason is %q", reason)
	}
	h.wantStatus(func(s nds.Status) bool {
		return s.ChecksumDifferences == 1 && s.Digest == p.digest() && s.Connected && len(p.requests()) == 2
	})
	table.wantTable(t, p)
	if last := p.requests()[1]; len(last.digests) == 0 || last.revision != "" { // it does not have what it was sent
		t.Errorf("the client comes back with %+v", last)
	}
}

// C3, C11: a malformed change is NACKed, the table stays, and so does the stream.
func TestMalformedChange(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlaneWith(t, plane)
		hostsIn(p)
		h, table := startHosts(t, p, nil)
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
		if reason := h.wantAnswer(p.server.PushResponses(delta, state)).Rejection().GetMessage(); !strings.Contains(reason, "want one table") {
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

// C11: control planes of both kinds follow each other. The table of one replaces the other's, and a
// client says what it has only if it came as changes.
func TestOtherControlPlane(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlaneWith(t, plane)
		hostsIn(p)
		dir := t.TempDir()
		config := stateDir(dir)
		h, table := startHosts(t, p, config)
		h.wantACK("v1")

		p.mu.Lock()
		p.away = true // what answers now is istiod
		p.mu.Unlock()
		whole := hosts("istio.example")
		p.server.Push(whole)
		h.wantStatus(func(s nds.Status) bool {
			return s.Mode == nds.ModeWhole && s.Digest == "" && s.Revision == nil
		})
		wantWhole := func(calls int) {
			t.Helper()
			if got := table.whole(); !bytes.Equal(got, plain(t, whole)) || table.calls() != calls {
				t.Errorf("the table is %q after %d calls", got, table.calls())
			}
		}
		wantWhole(2)
		p.server.CutStreams(nil)
		wait.Until(t, "another stream", func() bool { return len(p.requests()) == 2 })
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Pushes == 3 })
		if last := p.requests()[1]; last.merge != "hosts" || len(last.digests) > 0 || last.revision != "" {
			t.Errorf("after a whole table the client says %+v", last)
		}
		wantWhole(2) // the same again

		h.stop() // over a restart
		h, table = startHosts(t, p, config)
		<-h.client.Restored()
		wantWhole(1)
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

// setAll puts hosts into the table, and returns their names.
func (p *plane) setAll(hosts []birthday.Host) (names []string) {
	for _, h := range hosts {
		p.set(h.Name, h.Addr.String())
		names = append(names, h.Name)
	}
	return names
}

// C11, C12: a client that was away while a shard has got other hosts with the same digest is sent the whole table when
// the checksum shows that.
func TestEqualDigests(t *testing.T) {
	t.Parallel()
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		one, other := birthday.SameDigest()
		p := startPlaneWith(t, plane)
		hostsIn(p)
		p.setAll(one)
		h, table := startHosts(t, p, nil)
		h.wantACK("v1")
		p.setAll(other)
		p.server.CutStreams(nil)
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Digest == p.digest() })
		table.wantTable(t, p)
		if first := p.requests(); len(first) != 3 || len(first[1].digests) == 0 || len(first[2].digests) > 0 {
			t.Errorf("%d streams: %+v", len(first), first)
		}
	})
}

// C11: a change is used although the table has the same checksum after it.
func TestEqualChecksums(t *testing.T) {
	t.Parallel()
	p := startPlane(t)
	hostsIn(p)
	h, table := startHosts(t, p, nil)
	h.wantACK("v1")
	names, before := p.setAll(birthday.Vanishing()), h.client.Status().Digest
	if p.digest() != before {
		t.Fatal("the checksums differ")
	}
	h.wantACK(p.push(names...))
	table.wantTable(t, p)
}

// C9: pushes do not take more than a tenth of a processor, however fast they come. The answer to a push comes after the
// rest, so that the next push has all that has changed until then.
func TestRestAfterPush(t *testing.T) {
	t.Parallel()
	const long = 20 * time.Millisecond
	p := startPlane(t)
	hostsIn(p)
	var end time.Time
	calls := 0
	h := start(t, options{server: p.server, many: true, apply: func(map[int][]byte) error {
		if calls++; calls == 1 {
			<-time.After(long) // a table of many hosts
			end = time.Now()
		}
		return nil
	}})
	h.wantACK("v1")
	if rest := time.Since(end); rest < 9*long {
		t.Errorf("the push is answered after %v, want %v", rest, 9*long)
	}
	p.set("a.example", "192.0.2.9")
	h.wantACK(p.push("a.example"))
	h.table.wantTable(t, p)
}
