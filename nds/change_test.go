package nds_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
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
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlane(t, plane)
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
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		for _, restart := range []bool{false, true} {
			p := startPlane(t, plane)
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

// C12, D41: a bit that changes on the way from the control plane is found before the host is in use. The client
// says which hosts, ends the stream, and asks for the shard again.
func TestDamageOnTheWire(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlane(t, plane)
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

// D41: a host that is not what the control plane has sent, whatever the reason, is noticed when it changes. The client
// then says what it has, and is sent it again.
func TestAnotherHostThanWasSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := startPlane(t, fakexds.Options{})
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
	})
}

// C3, C11: a malformed change is NACKed, the table stays, and so does the stream.
func TestMalformedChange(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		p := startPlane(t, plane)
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

// C9: pushes do not take more than a tenth of a processor, however fast they come. The answer to a push comes after the
// rest, so that the next push has all that has changed until then.
func TestRestAfterPush(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const long = 20 * time.Millisecond
		p := startPlane(t, fakexds.Options{})
		hostsIn(p)
		var end time.Time
		took := long
		h := start(t, options{server: p.server, many: true, apply: func(map[int][]byte) error {
			<-time.After(took) // a table of many hosts
			end = time.Now()
			return nil
		}})
		h.wantACK("v1")
		if rest := time.Since(end); rest != 9*long {
			t.Errorf("the push is answered after %v, want %v", rest, 9*long)
		}
		took = time.Second
		p.set("a.example", "192.0.2.9")
		h.wantACK(p.push("a.example"))
		if rest := time.Since(end); rest != 500*time.Millisecond {
			t.Errorf("a long push is answered after %v", rest)
		}
		h.table.wantTable(t, p)
	})
}
