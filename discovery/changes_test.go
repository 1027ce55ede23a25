package discovery

import (
	"encoding/base64"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// A merging client merges hosts, as nametap's agent does.
type merging struct {
	client
	t     *testing.T
	hosts map[string]string // the encoded entry of each host, by its key
	// sum and revision came with the last change.
	sum      string
	revision []byte
}

// openMerging opens a stream of a client that merges hosts; it has the hosts of before, unless that
// is nil.
func openMerging(t *testing.T, variant string, r running, before *merging) *merging {
	t.Helper()
	c := &merging{t: t, hosts: map[string]string{}}
	meta := []string{metaMerge, "hosts"}
	if before != nil {
		c.hosts = maps.Clone(before.hosts)
		shards := c.sums()
		digests := shards.Digests().Bytes()
		meta = append(meta, "NAMETAP_HOSTS", base64.StdEncoding.EncodeToString(digests),
			"NAMETAP_REVISION", base64.StdEncoding.EncodeToString(before.revision))
	}
	c.client = open(t, variant, r, node(t, "shop", meta...))
	return c
}

// sums returns the checksum of each shard.
func (c *merging) sums() (b digest.Sums) {
	for host, entry := range c.hosts {
		at := digest.ShardOf(host)
		b[at] = b[at].Add(digest.Of([]byte(entry)))
	}
	return b
}

// merge waits for a push, applies it, and checks the checksum. It returns the sent and the removed
// hosts, without the domain of Services.
func (c *merging) merge() (sent, removed string) {
	c.t.Helper()
	p := c.next()
	if len(p.tables) != 1 {
		c.t.Fatalf("%d tables in a push, want one", len(p.tables))
	}
	var names, without []string
	for _, table := range p.tables {
		change := table.GetChange()
		complete, ok := digest.ParseSet(change.GetComplete())
		if change == nil || !ok {
			c.t.Fatalf("the table is no change: %v", change)
		}
		for host := range c.hosts {
			if complete.Has(digest.ShardOf(host)) {
				delete(c.hosts, host)
			}
		}
		for host, info := range table.GetTable() {
			one, err := proto.MarshalOptions{Deterministic: true}.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}})
			if err != nil {
				c.t.Fatal(err)
			}
			c.hosts[strings.ToLower(host)] = string(one)
			names = append(names, strings.TrimSuffix(host, ".shop.svc.cluster.local"))
		}
		for _, host := range change.GetRemoved() {
			delete(c.hosts, host)
			without = append(without, strings.TrimSuffix(host, ".shop.svc.cluster.local"))
		}
		shards := c.sums()
		sum := shards.Sum()
		c.sum, c.revision = sum.String(), change.GetRevision()
		if got := hex.EncodeToString(change.GetSum()); got != c.sum {
			c.t.Errorf("the checksum is %s, want %s", got, sum)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " "), strings.Join(without, " ")
}

// has reports whether a Service of namespace shop has an address.
func (c *merging) has(name, ip string) bool {
	return strings.Contains(c.hosts[name+".shop.svc.cluster.local"], ip)
}

// want merges a push, and checks what was sent and removed.
func (c *merging) want(sent, removed string) {
	c.t.Helper()
	if gotSent, gotRemoved := c.merge(); gotSent != sent || gotRemoved != removed {
		c.t.Errorf("sent %q, removed %q; want %q and %q", gotSent, gotRemoved, sent, removed)
	}
}

// TestHostsAreMerged checks that a client that merges hosts is sent the hosts that have changed, and
// nothing else, also when it connects again, to another server with the same objects.
func TestHostsAreMerged(t *testing.T) { // D30, D32, D37
	for _, variant := range []string{variantSotw, variantDelta} {
		t.Run(variant, func(t *testing.T) {
			a := fakekube.Start(t)
			a.Put(fakekube.Definitions, entryDefinition)
			put := func(name, ip string) { a.Put(fakekube.Services, svcYAML("shop", name, ip)) }
			put("s0", "10.0.0.1")
			put("s1", "10.0.0.2")
			r := start(t, onAPI(t, a))
			c := openMerging(t, variant, r, nil)
			c.want("s0 s1", "")
			put("s1", "10.0.1.2")
			c.want("s1", "")
			a.Remove(fakekube.Services, "shop/s1")
			c.want("", "s1")
			// A host that the client does not see is not sent, before one that it sees.
			a.Put(fakekube.ServiceEntries, entryIn("data", "hidden", "hosts: [hidden.example.com], addresses: [192.0.2.1], exportTo: ['.']")[4:])
			put("s2", "10.0.0.3")
			c.want("s2", "")

			again := openMerging(t, variant, r, c)
			again.want("", "")
			r.stop()
			r = start(t, onAPI(t, a))
			again = openMerging(t, variant, r, c)
			again.want("", "")
			before := maps.Clone(again.hosts)
			put("s2", "10.0.9.1")
			again.want("s2", "")
			openMerging(t, variant, r, &merging{t: t, hosts: before}).want("s2", "")

			// A rejected change is not sent again; the next change brings the whole table.
			again.nack()
			put("s2", "10.0.9.2")
			again.merge()
			again.hosts = map[string]string{}
			put("s2", "10.0.9.3")
			again.want("s0 s2", "")
		})
	}
}
