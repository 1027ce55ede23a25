package nds

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// testEntries returns a NameTable in wire form.
func testEntries(tb testing.TB, hosts ...string) []byte {
	tb.Helper()
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for _, host := range hosts {
		table.Table[host] = &api.NameTable_NameInfo{Ips: []string{"192.0.2.1"}}
	}
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		tb.Fatal(err)
	}
	return value
}

// testChange returns a change in wire form that leads from table, which may have no hosts.
func testChange(tb testing.TB, table *hostTable, entries []byte, m *api.NameTable_Change) []byte {
	tb.Helper()
	m.Sum = make([]byte, digest.SumSize)
	for {
		end, err := marshalChange(m)
		if err != nil {
			tb.Fatal(err)
		}
		value := slices.Concat(entries, end)
		c, err := parseChange(value)
		if err != nil {
			tb.Fatal(err)
		}
		if c.sum = sumAfter(table, &c); bytes.Equal(m.Sum, c.sum.Bytes()) {
			return value
		}
		m.Sum = c.sum.Bytes()
	}
}

// sumAfter returns the checksum of a table after a change, computed from all hosts.
func sumAfter(table *hostTable, c *change) (sum digest.Sum) {
	for _, raw := range hostsAfter(table, c) {
		sum = sum.Add(digest.Of(raw))
	}
	return sum
}

// hostsAfter returns the hosts of a table after a change.
func hostsAfter(table *hostTable, c *change) map[string][]byte {
	all := map[string][]byte{}
	for _, s := range table.shards {
		for rest := s.entries; len(rest) > 0; {
			key, n, _ := cutEntry(rest)
			if host := string(appendLower(nil, key)); !c.complete.Has(digest.ShardOf(host)) {
				all[host] = rest[:n]
			}
			rest = rest[n:]
		}
	}
	maps.Copy(all, c.hosts)
	maps.DeleteFunc(all, func(_ string, raw []byte) bool { return raw == nil })
	return all
}

// C11, C12: the parser of changes does not panic on any bytes. An accepted change leads to the
// table computed from all hosts, with its checksums; and the table is written and read as it is.
func FuzzChange(f *testing.F) {
	all := digest.All()
	var some digest.Set
	some.Add(digest.ShardOf("b.example"))
	f.Add(testChange(f, &hostTable{}, testEntries(f, "a.example", "B.example"), &api.NameTable_Change{Complete: all[:], Revision: []byte("1")}))
	f.Add(testChange(f, &hostTable{}, testEntries(f, "a.example"), &api.NameTable_Change{Removed: []string{"B.example", "none"}}))
	f.Add(testChange(f, &hostTable{}, nil, &api.NameTable_Change{Complete: some[:]}))
	f.Add([]byte{0x0a, 2, 0x0a, 5})
	f.Fuzz(func(t *testing.T, value []byte) {
		has, err := hasChange(value)
		c, parseErr := parseChange(value)
		if parseErr != nil {
			return
		}
		if err != nil || !has {
			t.Fatalf("parsed %q, and it has a change: %v, %v", value, has, err)
		}
		first, err := parseChange(testChange(t, &hostTable{}, testEntries(t, "a.example", "b.example", "c.example"), &api.NameTable_Change{}))
		if err != nil {
			t.Fatal(err)
		}
		before, err := new(hostTable).apply(&first)
		if err != nil {
			t.Fatal(err)
		}
		content := before.content()
		if c.sum != sumAfter(before, &c) {
			if _, err := before.apply(&c); !isDifference(err) {
				t.Fatalf("a wrong checksum is accepted: %v", err)
			}
			c.sum = sumAfter(before, &c)
		}
		after, err := before.apply(&c)
		if err != nil {
			t.Fatal(err)
		}
		if !maps.EqualFunc(after.content(), hostsAfter(before, &c), bytes.Equal) || after.len() != len(after.content()) {
			t.Fatalf("after the change %q", after.content())
		}
		if !maps.EqualFunc(before.content(), content, bytes.Equal) {
			t.Fatal("the change has changed the table before it")
		}
		if actual := after.summed(); actual.sums != after.sums {
			t.Fatalf("the sums do not match %q", after.content())
		}
		parts, err := snapshot{owner: "o", table: after, pushed: time.Unix(1, 0)}.marshal()
		if err != nil {
			t.Fatal(err)
		}
		reread, err := parseSnapshot(slices.Concat(parts...))
		if err != nil {
			t.Fatal(err)
		}
		if again := reread.table; again.sums != after.sums || !maps.EqualFunc(again.content(), after.content(), bytes.Equal) {
			t.Fatalf("written, and read as %v", again)
		}
		first.join(c)
		if direct, err := new(hostTable).apply(&first); err != nil || direct.sums != after.sums {
			t.Fatalf("both changes at once: %v", err)
		}
	})
}

// content returns the entries by host.
func (t *hostTable) content() map[string][]byte { return hostsAfter(t, &change{}) }

// C7, C11: the parser of the log does not panic on any bytes, and reads records as they were written,
// up to the first one that is damaged.
func FuzzLog(f *testing.F) {
	one := record{pushed: time.Unix(1, 2), version: "v1", change: testChange(f, &hostTable{}, testEntries(f, "a.example"), &api.NameTable_Change{})}
	two := record{pushed: time.Unix(3, 4), change: testChange(f, &hostTable{}, nil, &api.NameTable_Change{Removed: []string{"a.example"}})}
	log := two.append(one.append(nil))
	f.Add(log)
	f.Add(log[:len(log)-1])
	f.Add(slices.Concat(log, make([]byte, 50)))
	f.Add(log[recordHead:])
	f.Fuzz(func(t *testing.T, data []byte) {
		sealed := binary.BigEndian.AppendUint32(nil, uint32(len(data))) // what a fuzzer does not find
		sum := sha256.Sum256(data)
		for _, log := range [][]byte{data, slices.Concat(sealed, sum[:8], data)} {
			s, all := savedTable{}, change{hosts: map[string][]byte{}}
			s.replay(&all, log)
			var again []byte
			for rest := log; len(rest) > s.unused; {
				r, n := parseRecord(rest)
				if n == 0 {
					t.Fatalf("%d bytes are lost, but there is damage earlier", s.unused)
				}
				again = r.append(again)
				rest = rest[n:]
			}
			reread, allAgain := savedTable{}, change{hosts: map[string][]byte{}}
			if reread.replay(&allAgain, again); reread.unused > 0 || allAgain.sum != all.sum || reread.version != s.version ||
				!maps.EqualFunc(allAgain.hosts, all.hosts, bytes.Equal) {
				t.Fatalf("read %+v, after writing %+v", s, reread)
			}
		}
	})
}
