package push

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// A keeper is a client that keeps what it is sent, over streams.
type keeper struct {
	*fakeClient
	variant, mode, namespace, app string

	has       map[string]resource // by name
	announced map[string]string   // at the start of the stream; nil after the first response
}

// connect opens a stream, and ends the last one. With nonsense, the client announces other versions than it has, and
// resources of another server.
func (k *keeper) connect(s *Service, nonsense bool) {
	k.tb.Helper()
	if k.session != nil {
		k.end()
	}
	k.announced = map[string]string{}
	for name, r := range k.has {
		if k.announced[name] = r.version; nonsense && len(name)%2 == 0 {
			k.announced[name] = "nt:" + strconv.Itoa(len(name))
		}
	}
	if nonsense {
		k.has["of another server"], k.announced["of another server"], k.announced["512"] = resource{}, "1", "2"
	}
	meta := map[string]any{"NAMESPACE": k.namespace, "LABELS": map[string]any{"app": k.app}}
	k.fakeClient = joining{k.variant, k.mode, k.announced, meta}.join(k.tb, s)
}

// take applies the push that is to be answered, and acknowledges it. An agent does the same.
func (k *keeper) take() {
	k.tb.Helper()
	if !k.pending {
		return
	}
	sent := k.resources()
	if _, whole := sent[""]; whole {
		clear(k.has)
	} else if k.announced != nil {
		maps.DeleteFunc(k.has, func(name string, _ resource) bool { return k.announced[name] == "" })
	}
	k.announced = nil
	for _, name := range k.last.GetRemovedResources() {
		delete(k.has, name)
	}
	maps.Copy(k.has, sent)
	k.ack()
}

// table returns the hosts that the client has.
func (k *keeper) table() map[string]string {
	all := map[string]string{}
	for _, r := range k.has {
		maps.Copy(all, r.entries)
	}
	return all
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
			for i := range 1500 {
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
// and connect again, with the table that they have or with versions of another one. Whenever all have answered, each has
// exactly the table of its view.
func TestClientsKeepUp(t *testing.T) { // C3, D12, D30, D32, D33, D35, D37, D41
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 0))
		s := newService()
		var all []*keeper
		for _, as := range [][2]string{{variantSotw, modeWhole}, {variantSotw, modeNamed}, {variantDelta, modeWhole}, {variantDelta, modeNamed}} {
			for _, namespace := range []string{"shop", "data"} {
				k := &keeper{variant: as[0], mode: as[1], namespace: namespace, app: []string{"web", "db"}[r.IntN(2)], has: map[string]resource{}}
				k.fakeClient = &fakeClient{tb: t}
				k.connect(s, false)
				all = append(all, k)
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
					k.take()
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
					k.take()
				}
				view := k.said().view
				view.Sidecar = s.tables.hosts.Sidecar(k.namespace, hosts.NewLabels(map[string]string{"app": k.app}))
				if got, want := k.table(), entriesIn(t, Encode(s.tables.hosts, view)); !maps.Equal(got, want) {
					t.Fatalf("seed %d, step %d: %s %s client of %s has %d hosts, want %d", seed, step, k.variant, k.mode, k.namespace, len(got), len(want))
				}
				if a := k.shown(); !a.Current || a.State != StateCurrent || a.Digest != a.ServedDigest {
					t.Errorf("seed %d, step %d: a client with its table is shown as %+v", seed, step, a)
				}
			}
		}
	}
}
