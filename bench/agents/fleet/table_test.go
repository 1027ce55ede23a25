package fleet

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"

	"github.com/nametap/nametap/bench/agents/wire"
)

// raw returns entries as they are encoded in a table.
func raw(t *testing.T, hosts map[string]string) []byte {
	t.Helper()
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for host, address := range hosts {
		table.Table[host] = &api.NameTable_NameInfo{Ips: []string{address}}
	}
	b, err := proto.Marshal(table)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// An oracle keeps the checksums of entries, by the host and its address.
type oracle map[[2]string]digest.Sum

// sumOfAll returns the checksum of a table.
func (o oracle) sumOfAll(t *testing.T, hosts map[string]string) (sum digest.Sum) {
	t.Helper()
	for host, address := range hosts {
		id := [2]string{host, address}
		if _, ok := o[id]; !ok {
			o[id] = digest.Of(raw(t, map[string]string{host: address}))
		}
		sum = sum.Add(o[id])
	}
	return sum
}

// A table follows random changes, of hosts and of whole shards, and tables that were there before stay
// as they are.
func TestApply(t *testing.T) {
	model, sums := map[string]string{}, oracle{}
	current := newTable()
	type version struct {
		table *table
		sum   digest.Sum
	}
	var versions []version
	for n := range 300 {
		changed, change := map[string]string{}, wire.Change{}
		for range 1 + rand.IntN(20) {
			host := fmt.Sprintf("h%d.shop", rand.IntN(400))
			delete(changed, host)
			delete(model, host)
			if rand.IntN(4) == 0 {
				change.Removed = append(change.Removed, host)
				continue
			}
			changed[host] = strconv.Itoa(n)
		}
		for host, address := range changed {
			model[host] = address
			change.Removed = without(change.Removed, host)
		}
		if rand.IntN(3) == 0 { // a shard is complete
			b := rand.IntN(digest.Count)
			change.Complete.Add(b)
			for host, address := range model {
				if digest.ShardOf(host) != b {
					continue
				}
				if changed[host] == "" && rand.IntN(2) == 0 {
					delete(model, host)
					continue
				}
				changed[host] = address
			}
		}
		change.Sum = sums.sumOfAll(t, model)
		next, err := current.apply(raw(t, changed), change)
		if err != nil {
			t.Fatal(err)
		}
		if next.hosts != len(model) {
			t.Fatalf("%d hosts, want %d", next.hosts, len(model))
		}
		current = next
		versions = append(versions, version{next, change.Sum})
	}
	for _, v := range versions {
		for b, shard := range v.table.shards {
			if sumOf(shard) != v.table.sums[b] {
				t.Fatal("an earlier table has changed")
			}
		}
		if v.table.sum != v.sum {
			t.Fatal("an earlier table has another checksum")
		}
	}
	if _, err := current.apply(raw(t, map[string]string{"new": "x"}), wire.Change{Sum: current.sum}); err == nil {
		t.Error("no error for a change with a wrong checksum")
	}
	if _, err := current.apply([]byte("\x0a\x7f"), wire.Change{Sum: current.sum}); err == nil {
		t.Error("no error for a malformed table")
	}
}

func without(list []string, host string) (out []string) {
	for _, one := range list {
		if one != host {
			out = append(out, one)
		}
	}
	return out
}

// The set of tables forgets the oldest ones, and keeps one table for a checksum.
func TestTables(t *testing.T) {
	set := newTables()
	first := newTable()
	set.add(first)
	if set.add(newTable()) != first {
		t.Error("two tables of one checksum")
	}
	for i := range maxTables {
		next := newTable()
		next.sum = digest.Of(fmt.Append(nil, i))
		set.add(next)
	}
	if len(set.bySum) != maxTables || set.get(first.sum) != nil {
		t.Errorf("%d tables, the first is %v", len(set.bySum), set.get(first.sum))
	}
}

func TestQuantile(t *testing.T) {
	var all Times
	if all.Quantile(0.5) != 0 {
		t.Error("the median of nothing is not 0")
	}
	for i := 100; i > 0; i-- {
		all = append(all, time.Duration(i))
	}
	for share, want := range map[float64]time.Duration{0: 1, 0.5: 51, 0.99: 100, 1: 100} {
		if got := all.Quantile(share); got != want {
			t.Errorf("quantile %v is %v, want %v", share, got, want)
		}
	}
}
