package digest_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/nametap/nametap/api/digest"
)

// The shards that other implementations must find, too.
func TestKnownValues(t *testing.T) {
	for host, want := range map[string]int{"": 316, "a": 447, "foobar": 70, "*.Example.com.": 510, "*.example.com": 510} {
		if got := digest.ShardOf(host); got != want {
			t.Errorf("the shard of %q is %d, want %d", host, got, want)
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
	shards, err := digest.Split(slices.Concat(one, other, entry("a.example"), two))
	if err != nil || len(shards) != 2 {
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
