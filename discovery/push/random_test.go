package push

import (
	"encoding/base64"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// A keeper is a client that keeps what it is sent, over streams.
type keeper struct {
	*fakeClient
	variant, merge, namespace, app string

	table   map[string]string // the encoded entries, by the host in lower case
	version string            // of the table, for a client that merges none
	misled  bool              // it has sent digests of hosts that it does not have
}

// connect opens a stream, and ends the last one. With nonsense, the client claims to have other hosts than it has.
func (k *keeper) connect(s *Service, nonsense bool) {
	k.tb.Helper()
	if k.session != nil {
		k.end()
	}
	meta := map[string]any{"NAMESPACE": k.namespace, metaMerge: k.merge, "LABELS": map[string]any{"app": k.app}}
	if k.merge == mergeHosts && len(k.table) > 0 {
		sums := k.sums()
		digests := sums.Digests().Bytes()
		if k.misled = nonsense; nonsense {
			clear(digests[:digest.DigestsSize/2])
		}
		meta[metaHosts] = base64.StdEncoding.EncodeToString(digests)
	}
	k.fakeClient = joining{k.variant, k.version, meta}.join(k.tb, s)
}

// sums returns the checksum of each shard.
func (k *keeper) sums() (all digest.Sums) {
	for host, entry := range k.table {
		at := digest.ShardOf(host)
		all[at] = all[at].Add(digest.Of([]byte(entry)))
	}
	return all
}

// take applies the push that is to be answered, and acknowledges it. A client that was misled rejects a push with a
// wrong checksum, and connects again without a table.
func (k *keeper) take(s *Service) {
	k.tb.Helper()
	if !k.pending {
		return
	}
	for _, r := range k.last.GetResources() {
		before := k.table
		if k.apply(r); k.merge != mergeHosts || k.sum() == k.lastSum() {
			continue
		}
		if k.table = before; !k.misled {
			k.tb.Errorf("the checksum after a push to %s is wrong", k.namespace)
		}
		k.nack()
		k.table = nil
		k.connect(s, false)
		return
	}
	k.ack()
}

func (k *keeper) sum() string {
	sums := k.sums()
	return string(sums.Sum().Bytes())
}

func (k *keeper) lastSum() string {
	change, _ := k.change()
	return string(change.GetSum())
}

// apply applies a resource.
func (k *keeper) apply(r *discoveryv3.Resource) {
	k.tb.Helper()
	next := entriesIn(k.tb, r.GetResource().GetValue())
	if k.merge != mergeHosts {
		k.table, k.version = next, r.GetVersion()
		return
	}
	change, _ := k.change()
	complete, _ := digest.ParseSet(change.GetComplete())
	sent := maps.Clone(next)
	for host, entry := range k.table {
		if _, ok := sent[host]; !ok && !complete.Has(digest.ShardOf(host)) {
			next[host] = entry
		}
	}
	for _, host := range change.GetRemoved() {
		if _, ok := sent[host]; ok {
			k.tb.Errorf("%s is both sent and removed", host)
		}
		delete(next, host)
	}
	k.table = next
}

// entriesIn returns the encoded entries of a table, by the host in lower case.
func entriesIn(tb testing.TB, encoded []byte) map[string]string {
	tb.Helper()
	var table api.NameTable
	if err := proto.Unmarshal(encoded, &table); err != nil {
		tb.Fatal(err)
	}
	out := map[string]string{}
	for host, info := range table.GetTable() {
		one := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{host: info}}
		entry, err := proto.MarshalOptions{Deterministic: true}.Marshal(one)
		if err != nil {
			tb.Fatal(err)
		}
		out[strings.ToLower(host)] = string(entry)
	}
	return out
}

// randomChange returns a change of an object, whose name others share.
func randomChange(r *rand.Rand) hosts.Change {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	o := object.Object{Key: object.Key{Namespace: pick("shop", "data"), Name: pick("a", "b", "c", "d", "e", "f")}}
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(5))})}
	scope, err := object.NewExportTo([]string{pick("*", ".", "shop", "data", "~")}, o.Key.Namespace)
	if err != nil {
		panic(err)
	}
	switch r.IntN(8) {
	case 0, 1, 2:
		o.Key.Kind, o.Service = object.KindService, &object.Service{ClusterIPs: addrs, ExportTo: scope}
	case 3:
		target := pick("a.shop.svc.cluster.local", "API.example.com", "nowhere.example.com")
		o.Key.Kind, o.Service = object.KindService, &object.Service{ExternalName: target}
	case 4, 5:
		names := []string{pick("api.example.com", "API.example.com", "www.example.com", "*.example.com")}
		if r.IntN(30) == 0 {
			for i := range 1500 { // more than a history has
				names = append(names, fmt.Sprintf("h%d.bulk.example.com", i))
			}
		}
		o.Key.Kind = object.KindServiceEntry
		o.Entry = &object.ServiceEntry{Hosts: names, Addrs: addrs, HasAddresses: true, ExportTo: scope}
	case 6:
		o.Key = object.Key{Kind: object.KindSidecar, Namespace: pick("shop", "data", "istio-system"), Name: pick("s", "t")}
		egress := object.EgressHost{Namespace: pick("*", ".", "data"), Host: pick("*", "*.example.com")}
		o.Sidecar = &object.Sidecar{Egress: []object.EgressListener{{Hosts: []object.EgressHost{egress, {Namespace: "tick", Host: "*"}}}}}
		if r.IntN(2) == 0 {
			o.Sidecar.Labels = map[string]string{"app": "web"}
		}
	case 7:
		o.Key = object.Key{Kind: object.KindConfigMap, Namespace: object.DefaultRootNamespace, Name: "istio"}
		o.Mesh = &object.Mesh{ExportTo: []string{pick("*", ".")}}
	}
	if r.IntN(4) == 0 {
		return hosts.Change{Removed: []object.Key{o.Key}}
	}
	return hosts.Change{Updated: []object.Object{o}}
}

// TestClientsKeepUp makes random changes of objects. Clients of all kinds answer pushes late or not at all, reject them,
// and connect again, with the table that they have or with digests of another one. Whenever all have answered, each has
// exactly the table of its view.
func TestClientsKeepUp(t *testing.T) { // C3, D12, D30, D32, D33, D35, D37, D41
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 0))
		s := newService()
		var all []*keeper
		for _, variant := range []string{variantSotw, variantDelta} {
			for _, merge := range []string{mergeHosts, ""} {
				for _, namespace := range []string{"shop", "data"} {
					k := &keeper{variant: variant, merge: merge, namespace: namespace, app: []string{"web", "db"}[r.IntN(2)]}
					k.fakeClient = &fakeClient{tb: t}
					k.connect(s, false)
					all = append(all, k)
				}
			}
		}
		for step := range 200 {
			s.updateAll(t, randomChange(r), randomChange(r), randomChange(r))
			for _, k := range all {
				if a := k.shown(); !k.pending && !a.Current && a.State != StateRejected {
					t.Errorf("seed %d, step %d: a client is behind, and is sent nothing: %+v", seed, step, a)
				}
			}
			for range r.IntN(6) {
				k := all[r.IntN(len(all))]
				switch n := r.IntN(8); {
				case n == 0 && k.pending:
					k.nack()
				case n == 1:
					k.connect(s, false)
				case n == 2:
					k.connect(s, true)
				default:
					k.take(s)
				}
			}
			if step%20 != 19 {
				continue
			}
			tick := service("tick", "tick", fmt.Sprint("192.0.2.", step)) // which all see, so rejected tables are sent again
			tick.Service.ExportTo = object.ExportTo{Public: true}
			s.updateAll(t, hosts.Change{Updated: []object.Object{tick}})
			for _, k := range all {
				for k.pending {
					k.take(s)
				}
				view := k.client.view
				view.Sidecar = s.tables.hosts.Sidecar(k.namespace, hosts.NewLabels(map[string]string{"app": k.app}))
				if want := entriesIn(t, Encode(s.tables.hosts, view)); !maps.Equal(k.table, want) {
					t.Fatalf("seed %d, step %d: %s of %s merging %q has %d hosts, want %d", seed, step, k.variant, k.namespace, k.merge, len(k.table), len(want))
				}
				if a := k.shown(); !a.Current || a.State != StateCurrent || a.Digest != a.ServedDigest {
					t.Errorf("seed %d, step %d: a client with its table is shown as %+v", seed, step, a)
				}
			}
		}
	}
}
