package discovery

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// ahead returns a client with a revision in which the version of Services is later by one.
func (c *merging) ahead() *merging {
	r := source.ParseRevision(c.revision)
	r[0]++
	return &merging{hosts: c.hosts, revision: r.Encode()}
}

// TestReplicaIsBehind checks that a replica that has read less than a client's last one waits before it
// serves the client, and does not wait for what changes no host.
func TestReplicaIsBehind(t *testing.T) { // D38
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, onAPI(t, a))
	first := openMerging(t, variantDelta, r, nil)
	first.want("web", "")

	ahead := openMerging(t, variantDelta, r, first.ahead())
	ahead.quiet()
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
	ahead.want("web", "")
	if n := r.metric(t, "clients_ahead_total"); n != 1 {
		t.Errorf("%v clients have waited, want 1", n)
	}

	// What is read then changes no host.
	noHost := openMerging(t, variantDelta, r, ahead.ahead())
	noHost.quiet()
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
	noHost.want("", "")

	again := openMerging(t, variantSotw, r, noHost)
	again.want("", "")
	for _, revision := range []string{"\x00", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", ""} { // of another release, or nonsense
		openMerging(t, variantSotw, r, &merging{hosts: noHost.hosts, revision: []byte(revision)}).want("", "")
	}
	if n := r.metric(t, "clients_ahead_total"); n != 2 {
		t.Errorf("%v clients have waited, want 2", n)
	}
}

// TestClientsOfAnotherAPIServer checks that clients whose revision never comes, as after etcd was restored, are
// served when a list has shown that there is nothing later, and cost no builds while they wait.
func TestClientsOfAnotherAPIServer(t *testing.T) { // D38
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, onAPI(t, a))
	first := openMerging(t, variantDelta, r, nil)
	first.want("web", "")
	before := r.metric(t, "builds_total")
	var waiting []*merging
	for range 5 {
		waiting = append(waiting, openMerging(t, variantDelta, r, first.ahead()))
	}
	for _, c := range waiting {
		c.want("", "")
	}
	if n := r.metric(t, "builds_total") - before; n > 4 { // two for each list
		t.Errorf("%v builds while clients waited", n)
	}
	if n := r.metric(t, "clients_ahead_total"); n != 5 {
		t.Errorf("%v clients have waited, want 5", n)
	}
}

// TestReplicasAgree checks that replicas that have seen the same objects in different orders serve the same
// versions and checksums, and that a client that moves is sent nothing.
func TestReplicasAgree(t *testing.T) { // D36, D37
	t.Parallel()
	a := fakekube.Start(t)
	for i := range 20 {
		a.Put(fakekube.Services, svcYAML("shop", fmt.Sprint("s", i), fmt.Sprint("10.0.0.", i+1)))
	}
	early := start(t, onAPI(t, a))
	c := openMerging(t, variantDelta, early, nil)
	c.merge()
	for i := range 20 {
		if i%3 == 0 {
			a.Remove(fakekube.Services, fmt.Sprint("shop/s", i))
			continue
		}
		a.Put(fakekube.Services, svcYAML("shop", fmt.Sprint("s", i), fmt.Sprint("10.0.1.", i+1)))
	}
	wait.Until(t, "all edits have arrived", func() bool {
		c.merge()
		return len(c.hosts) == 13 && c.has("s19", "10.0.1.20")
	})
	late := start(t, onAPI(t, a))
	moved := openMerging(t, variantDelta, late, c)
	moved.want("", "")
	if moved.sum != c.sum {
		t.Errorf("the checksums are %s and %s", c.sum, moved.sum)
	}
	for _, r := range []running{early, late} {
		wait.Until(t, "the replica shows its client up to date", func() bool {
			all := slices.Collect(r.Agents(""))
			if len(all) != 1 || all[0].Hosts != 13 || all[0].ServedDigest != c.sum {
				t.Fatalf("agents %+v, want one with 13 hosts and the digest %s", all, c.sum)
			}
			return all[0].Current && all[0].Digest == c.sum
		})
		if n := r.metric(t, "replica_differences_total"); n != 0 {
			t.Errorf("%v differences between replicas that agree", n)
		}
	}
}

// TestReplicasDiffer checks that a client whose last replica had the same objects and another table is
// counted, logged, and sent what this replica has.
func TestReplicasDiffer(t *testing.T) { // D41
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	log := testlog.New(t)
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	r := start(t, cfg)
	c := openMerging(t, variantDelta, r, nil)
	c.want("web", "")
	c.hosts = map[string]string{"other.example.com": "what another replica has made of the same objects"}
	openMerging(t, variantDelta, r, c).want("web", "")
	if n := r.metric(t, "replica_differences_total"); n != 1 {
		t.Errorf("%v differences are counted, want 1", n)
	}
	if log.Count("another replica with the same objects serves another table") != 1 {
		t.Errorf("the log is\n%s", log)
	}
}

// TestRemovalWhileAway checks that an object that is removed makes the revision later: a client that was away
// then is not taken for one of a replica that differs.
func TestRemovalWhileAway(t *testing.T) { // D38, D41
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("shop", "db", "10.0.0.2"))
	r := start(t, onAPI(t, a))
	stays, leaves := openMerging(t, variantDelta, r, nil), openMerging(t, variantSotw, r, nil)
	stays.want("db web", "")
	leaves.want("db web", "")
	a.Remove(fakekube.Services, "shop/web")
	stays.want("", "web")
	again := openMerging(t, variantSotw, r, leaves)
	if again.want("", ""); len(again.hosts) != 1 {
		t.Errorf("the client has %v", again.hosts)
	}
	if n := r.metric(t, "replica_differences_total"); n != 0 {
		t.Errorf("%v differences between replicas are counted, and there is one replica", n)
	}
}

// TestWatchStalls checks that a replica whose watches have become silent serves a client that comes from another
// replica what that one has, also of a custom resource whose definition it has not heard of.
func TestWatchStalls(t *testing.T) { // D38, D60
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	stalled := start(t, onAPI(t, a))
	c := openMerging(t, variantDelta, stalled, nil)
	c.want("web", "")
	a.StallWatches()
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.ServiceEntries, entryIn("shop", "api", "hosts: [api.example.com], addresses: [192.0.2.1]")[4:])
	c.quiet()

	moved := openMerging(t, variantDelta, start(t, onAPI(t, a)), c)
	moved.want("api.example.com web", "")
	back := openMerging(t, variantDelta, stalled, moved)
	back.want("", "")
	if !back.has("web", "10.0.0.2") || len(back.hosts) != 2 {
		t.Errorf("the client has %v", back.hosts)
	}
	wait.Until(t, "the client that has stayed has all changes", func() bool {
		c.merge()
		return c.has("web", "10.0.0.2") && len(c.hosts) == 2
	})
}

// TestUnconfirmedClient checks that a client that comes from a replica that has read more is not sent an older table
// while the API server is away. It is refused, so it keeps its table.
func TestUnconfirmedClient(t *testing.T) { // D38
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, onAPI(t, a))
	first := openMerging(t, variantDelta, r, nil)
	first.want("web", "")
	a.Leave()
	ahead := openMerging(t, variantDelta, r, first.ahead())
	if err := ahead.err(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "keep your table") {
		t.Errorf("the stream ended with %v", err)
	}
	if n := r.metric(t, "streams_ended_total", "behind"); n != 1 {
		t.Errorf("%v streams are counted, want 1", n)
	}
	openMerging(t, variantDelta, r, first).want("", "")
	a.Return()
	openMerging(t, variantDelta, r, first.ahead()).want("", "")
}

// TestRestoreIsOvertaken checks that a replica serves what etcd has after it was restored from a
// backup, even if, before the replica connects again, new changes reach the version that it has
// heard of.
func TestRestoreIsOvertaken(t *testing.T) { // D60
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "kept", "10.0.0.1"))
	a.Put(fakekube.Services, svcYAML("shop", "removed", "10.0.0.2"))
	r := start(t, onAPI(t, a))
	c := openMerging(t, variantDelta, r, nil)
	c.want("kept removed", "")
	a.Put(fakekube.Services, svcYAML("shop", "kept", "10.0.0.3"))
	c.want("kept", "")
	a.Remove(fakekube.Services, "shop/removed")
	c.want("", "removed")
	a.Put(fakekube.Services, svcYAML("shop", "added", "10.0.0.4"))
	c.want("added", "")
	a.Restore(3, func() {
		a.Put(fakekube.Services, svcYAML("shop", "missed", "10.0.0.5"))
		for range 5 {
			a.Put(fakekube.ConfigMaps, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other, namespace: other}\n")
		}
	})
	c.want("kept missed removed", "added")
	if !c.has("kept", "10.0.0.1") {
		t.Errorf("the client has %v", c.hosts)
	}
}

// TestRevisionAfterList checks that the revision is later after an object was removed while the API server
// could not be watched, and earlier after etcd was restored: clients that connect again do not wait.
func TestRevisionAfterList(t *testing.T) { // D38
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	r := start(t, onAPI(t, a))
	c := openMerging(t, variantDelta, r, nil)
	c.want("web", "")
	services := func() uint64 { return source.ParseRevision(c.revision)[0] }
	first := services()
	a.Leave()
	a.Forget(fakekube.Services)
	a.Return()
	c.want("", "web")
	if services() <= first {
		t.Errorf("the revision of Services is %d after one was removed, and was %d", services(), first)
	}
	for i := range 3 {
		a.Put(fakekube.Services, svcYAML("shop", fmt.Sprint("s", i), "10.0.0.1"))
		c.want(fmt.Sprint("s", i), "")
	}
	last := services()
	a.Restore(2, func() {})
	c.want("", "s1 s2")
	if services() >= last {
		t.Errorf("the revision of Services is %d after etcd was restored, and was %d", services(), last)
	}
	openMerging(t, variantDelta, r, c).want("", "")
	if n := r.metric(t, "clients_ahead_total"); n != 0 {
		t.Errorf("%v clients have waited, want none", n)
	}
}
