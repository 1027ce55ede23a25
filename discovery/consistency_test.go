package discovery

import (
	"fmt"
	"slices"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestReplicasAgree checks that replicas that have seen the same objects in different orders serve the same
// versions and checksums, and that a client that moves is sent nothing.
func TestReplicasAgree(t *testing.T) { // D36, D37
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
