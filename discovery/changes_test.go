package discovery

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
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
	t.Parallel()
	for _, variant := range []string{variantSotw, variantDelta} {
		t.Run(variant, func(t *testing.T) {
			dir := t.TempDir()
			services := func(ips ...string) {
				var text strings.Builder
				for i, ip := range ips {
					text.WriteString(svcYAML("shop", fmt.Sprint("s", i), ip))
				}
				write(t, dir, "a.yaml", text.String())
			}
			services("10.0.0.1", "10.0.0.2", "10.0.0.3")
			r := start(t, Config{ConfigDir: dir})
			c := openMerging(t, variant, r, nil)
			c.want("s0 s1 s2", "")
			c.quiet()
			services("10.0.0.1", "10.0.1.2", "10.0.0.3", "10.0.0.4")
			c.want("s1 s3", "")
			services("10.0.0.1", "10.0.1.2")
			c.want("", "s2 s3")
			write(t, dir, "b.yaml", entryIn("data", "hidden", "hosts: [hidden.example.com], addresses: [192.0.2.1], exportTo: ['.']"))
			c.quiet()

			again := openMerging(t, variant, r, c)
			again.want("", "")
			again.quiet()
			r.stop()
			r = start(t, Config{ConfigDir: dir})
			again = openMerging(t, variant, r, c)
			again.want("", "")
			services("10.0.0.1", "10.0.9.9")
			again.want("s1", "")

			// What has changed while a client was away: one host of this server, or a shard of another.
			before := maps.Clone(again.hosts)
			services("10.0.0.1", "10.0.9.1")
			again.want("s1", "")
			openMerging(t, variant, r, &merging{t: t, hosts: maps.Clone(before)}).want("s1", "")
			r.stop()
			r = start(t, Config{ConfigDir: dir})
			behind := openMerging(t, variant, r, &merging{t: t, hosts: before})
			behind.want("s1", "")

			// A rejected change is not sent again; the next change brings the whole table.
			behind.nack()
			services("10.0.0.1", "10.0.9.2")
			behind.merge()
			behind.quiet()
			behind.hosts = map[string]string{}
			services("10.0.0.1", "10.0.9.3")
			behind.want("s0 s1", "")
		})
	}
}

// TestSidecarOfMergingClient checks that a client whose Sidecar changes is sent what that shows and hides.
func TestSidecarOfMergingClient(t *testing.T) { // D12
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svcYAML("shop", "a", "10.0.0.1")+svcYAML("shop", "b", "10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	c := openMerging(t, variantDelta, r, nil)
	c.want("a b", "")
	write(t, dir, "sidecar.yaml", sidecarYAML("default", "shop", "egress: [{hosts: [./a.shop.svc.cluster.local]}]"))
	c.merge()
	if len(c.hosts) != 1 {
		t.Errorf("the client has %d hosts, want 1", len(c.hosts))
	}
	write(t, dir, "sidecar.yaml", "# none\n")
	c.merge()
	if len(c.hosts) != 2 {
		t.Errorf("the client has %d hosts, want 2", len(c.hosts))
	}
}

// TestHostThatComesAndGoes checks that a client that is slow is not sent a host that was added and removed
// meanwhile.
func TestHostThatComesAndGoes(t *testing.T) { // D33
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, onAPI(t, a))
	slow := openMerging(t, variantDelta, r, nil)
	wait.Until(t, "the first push, which is not answered", func() bool { return r.metric(t, "pushes_total", variantDelta) == 1 })
	observer := openMerging(t, variantDelta, r, nil)
	observer.want("web", "")
	before := maps.Clone(observer.hosts)
	a.Put(fakekube.Services, svcYAML("shop", "brief", "10.0.0.2"))
	observer.want("brief", "")
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.3"))
	observer.want("web", "")
	a.Remove(fakekube.Services, "shop/brief")
	observer.want("", "brief")
	slow.want("web", "") // the first push
	slow.want("web", "")
	openMerging(t, variantDelta, r, &merging{t: t, hosts: before}).want("web", "")
}

// TestClientThatAsksAgain checks that a client in state-of-the-world that asks again, without a nonce, is sent
// the whole table also after it has rejected that, and that a nonce of an earlier stream does no harm.
func TestClientThatAsksAgain(t *testing.T) { // D30
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, Config{ConfigDir: dir})
	str, err := r.dial(t).StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	first := &discoveryv3.DiscoveryRequest{Node: node(t, "shop", metaMerge, "hosts"), TypeUrl: typeURL, ResponseNonce: "of an earlier stream"}
	for i, request := range []*discoveryv3.DiscoveryRequest{first, {TypeUrl: typeURL}, {TypeUrl: typeURL}} {
		if err := str.Send(request); err != nil {
			t.Fatal(err)
		}
		response, err := str.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if len(response.GetResources()) != 1 {
			t.Fatalf("request %d: %d resources, want 1", i, len(response.GetResources()))
		}
		table := unmarshal(t, typeURL, response.GetResources()[0].GetValue())
		if complete, _ := digest.ParseSet(table.GetChange().GetComplete()); len(table.GetTable()) != 1 || complete != digest.All() {
			t.Errorf("request %d: got %v, want the whole table", i, table)
		}
		answer := &discoveryv3.DiscoveryRequest{TypeUrl: typeURL, ResponseNonce: response.GetNonce(), ErrorDetail: errorDetail(i == 1)}
		if err := str.Send(answer); err != nil {
			t.Fatal(err)
		}
	}
}
