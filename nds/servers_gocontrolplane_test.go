package nds_test

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/nds"
)

// A linear is go-control-plane's server with a LinearCache.
type linear struct {
	serverv3.Server
	cache *cachev3.LinearCache
	end   context.CancelFunc
}

func newLinear() controlPlane {
	ctx, end := context.WithCancel(context.Background())
	cache := cachev3.NewLinearCache(typeURL)
	return &linear{serverv3.NewServer(ctx, cache, nil), cache, end}
}

func (l *linear) set(all tables) {
	updated, removed := map[string]types.Resource{}, []string(nil)
	for name, hosts := range all {
		updated[name] = &api.NameTable{Table: hosts}
	}
	for name := range l.cache.GetResources() {
		if _, ok := all[name]; !ok {
			removed = append(removed, name)
		}
	}
	if err := l.cache.UpdateResources(updated, removed); err != nil {
		panic(err) // a mistake in the test
	}
}

func (l *linear) close() { l.end() }

// A snapshots is go-control-plane's server with a SnapshotCache, which has the same snapshot for all nodes.
type snapshots struct {
	serverv3.Server
	cache cachev3.SnapshotCache
	ttl   *time.Duration
	count int
	end   context.CancelFunc
}

// heartbeats is how often a SnapshotCache sends heartbeats.
const heartbeats = 20 * time.Second

// newSnapshots returns a control plane. With ttl, about half of its resources have a TTL, which heartbeats
// renew.
func newSnapshots(ttl *time.Duration) *snapshots {
	ctx, end := context.WithCancel(context.Background())
	cache := cachev3.NewSnapshotCacheWithHeartbeating(ctx, false, oneNode{}, nil, heartbeats)
	return &snapshots{serverv3.NewServer(ctx, cache, nil), cache, ttl, 0, end}
}

func (s *snapshots) set(all tables) {
	s.count++
	next := &snapshot{version: strconv.Itoa(s.count), resources: map[string]types.ResourceWithTTL{}, versions: map[string]string{}}
	for name, hosts := range all {
		r := types.ResourceWithTTL{Resource: &api.NameTable{Table: hosts}}
		if len(name)%2 == 0 {
			r.TTL = s.ttl
		}
		next.resources[name] = r
		next.versions[name] = cachev3.HashResource(hosts.bytes())
	}
	if err := s.cache.SetSnapshot(context.Background(), "", next); err != nil {
		panic(err) // a mistake in the test
	}
}

func (s *snapshots) close() { s.end() }

// oneNode takes all nodes for the same.
type oneNode struct{}

func (oneNode) ID(*corev3.Node) string { return "" }

// A snapshot has resources of one type. go-control-plane's own Snapshot knows Envoy's types only.
type snapshot struct {
	version   string
	resources map[string]types.ResourceWithTTL
	versions  map[string]string
}

func (s *snapshot) GetVersion(string) string                                   { return s.version }
func (s *snapshot) GetResourcesAndTTL(string) map[string]types.ResourceWithTTL { return s.resources }
func (s *snapshot) GetVersionMap(string) map[string]string                     { return s.versions }
func (s *snapshot) ConstructVersionMap() error                                 { return nil }

func (s *snapshot) GetResources(string) map[string]types.Resource {
	all := map[string]types.Resource{}
	for name, r := range s.resources {
		all[name] = r.Resource
	}
	return all
}

// C3, C10: go-control-plane's state-of-the-world sends a rejected response again at once. The client answers it twice a
// second, and logs it once a minute.
func TestRejectedAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := startWire(t, true)
		s := newSnapshots(nil)
		defer s.close()
		w.service = s
		bad := &snapshot{version: "1", resources: map[string]types.ResourceWithTTL{"a": {Resource: wrapperspb.String("no entry")}}}
		if err := s.cache.SetSnapshot(t.Context(), "", bad); err != nil {
			t.Fatal(err)
		}
		h := start(t, options{config: func(cfg *nds.Config) { cfg.Dial = w.dial }})
		<-time.After(59 * time.Second)
		synctest.Wait()
		if n := h.client.Status().Rejected; n < 100 || n > 120 {
			t.Errorf("%d responses in 59 s", n)
		}
		if n := h.logs.Count("push rejected"); n != 1 {
			t.Errorf("%d lines in 59 s", n)
		}
		s.set(tables{"a": {"a.example": {Ips: []string{"192.0.2.1"}, Registry: "External"}}})
		h.wantApplied(plain(t, hosts("a.example")))
		h.wantLog("push rejected", "repeated=")
	})
}
