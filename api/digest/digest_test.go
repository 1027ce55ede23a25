package digest_test

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/nametap/nametap/api/digest"
)

// The values that other implementations must find, too: of SHA-256 and of the shard of a host.
func TestKnownValues(t *testing.T) {
	if got, want := digest.Of([]byte("abc")).String(), "ba7816bf8f01cfea414140de5dae2223"; got != want {
		t.Errorf("the sum of abc is %s, want %s", got, want)
	}
	for host, want := range map[string]int{"": 316, "a": 447, "foobar": 70, "*.Example.com.": 510, "*.example.com": 510} {
		if got := digest.ShardOf(host); got != want {
			t.Errorf("the shard of %q is %d, want %d", host, got, want)
		}
	}
}

// D36, D41: a sum depends on the set of entries, not on the order in which they came and went.
func TestOrderDoesNotMatter(t *testing.T) {
	var want digest.Sum
	entries := make([]digest.Sum, 100)
	for i := range entries {
		entries[i] = digest.Of([]byte{byte(i)})
		if i%2 == 0 {
			want = want.Add(entries[i])
		}
	}
	var got digest.Sum
	for _, i := range rand.Perm(len(entries)) {
		got = got.Add(entries[i])
	}
	for _, i := range rand.Perm(len(entries)) {
		if i%2 == 1 {
			got = got.Sub(entries[i])
		}
	}
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, s := range entries {
		got = got.Sub(s)
	}
	for _, s := range entries {
		got = got.Add(s)
	}
	if got != want {
		t.Errorf("after a borrow and a carry: %s, want %s", got, want)
	}
}

func TestSumBytes(t *testing.T) {
	sum := digest.Of([]byte("x"))
	if got := hex.EncodeToString(sum.Bytes()); got != sum.String() {
		t.Errorf("bytes %s of %s", got, sum)
	}
	if got, ok := digest.ParseSum(sum.Bytes()); !ok || got != sum {
		t.Errorf("parsed %s, %v", got, ok)
	}
	for _, n := range []int{0, digest.SumSize - 1, digest.SumSize + 1} {
		if _, ok := digest.ParseSum(make([]byte, n)); ok {
			t.Errorf("a sum of %d bytes is accepted", n)
		}
	}
}

func TestDiffering(t *testing.T) {
	var a, b digest.Sums
	for i := range a {
		a[i] = digest.Of([]byte{byte(i)})
	}
	b = a
	b[3], b[511] = digest.Sum{}, digest.Of(nil)
	var want digest.Set
	want.Add(3)
	want.Add(511)
	before, after := a.Digests(), b.Digests()
	if got := before.Differing(&after); got != want {
		t.Errorf("differing: %x, want %x", got, want)
	}
	digests := a.Digests()
	if got, ok := digest.ParseDigests(digests.Bytes()); !ok || got != digests {
		t.Errorf("parsed %x, %v; want %x", got, ok, digests)
	}
	if _, ok := digest.ParseDigests(make([]byte, digest.DigestsSize-1)); ok {
		t.Error("digests that are too short are accepted")
	}
	if !want.Has(3) || want.Has(2) {
		t.Error("the set has other shards than were added")
	}
	if got, want := a.Sum().Sub(b.Sum()), a[3].Add(a[511]).Sub(b[511]); got != want {
		t.Errorf("the sums of all shards differ by %s, want %s", got, want)
	}
}

func TestParseSet(t *testing.T) {
	all := digest.All()
	if got, ok := digest.ParseSet(all[:]); !ok || got != all {
		t.Errorf("parsed %x, %v", got, ok)
	}
	if got, ok := digest.ParseSet(nil); !ok || got != (digest.Set{}) {
		t.Errorf("the empty set is %x, %v", got, ok)
	}
	for _, n := range []int{1, digest.SetSize - 1, digest.SetSize + 1} {
		if _, ok := digest.ParseSet(bytes.Repeat([]byte{1}, n)); ok {
			t.Errorf("a set of %d bytes is accepted", n)
		}
	}
}

// TestSplit checks that the entries of tables are split by the shards of their hosts.
func TestSplit(t *testing.T) { // C11
	entry := func(host string) []byte {
		return append([]byte{0x0a, byte(len(host) + 2), 0x0a, byte(len(host))}, host...)
	}
	one, two := entry("web.shop"), entry("WEB.shop")
	other := []byte{0x10, 5} // a field of another version
	shards, err := digest.Split(slices.Concat(one, other, entry("a.example")), two)
	if err != nil || len(shards) != digest.Count {
		t.Fatalf("%d shards, %v", len(shards), err)
	}
	if got := shards[digest.ShardOf("web.shop")]; !bytes.Equal(got, slices.Concat(one, two)) {
		t.Errorf("the shard has %q", got)
	}
	size := 0
	for _, part := range shards {
		size += len(part)
	}
	if want := len(one) + len(two) + len(entry("a.example")); size != want {
		t.Errorf("all shards have %d bytes, want %d", size, want)
	}
	for _, bad := range [][]byte{{0x0a, 8}, {0x0a, 2, 0x0a, 5}, {0xff}} {
		if _, err := digest.Split(bad); err == nil {
			t.Errorf("%x is accepted", bad)
		}
	}
}
