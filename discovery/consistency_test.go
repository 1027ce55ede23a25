package discovery

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
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
	c := openNaming(t, early, nil)
	c.take()
	for i := range 20 {
		if i%3 == 0 {
			a.Remove(fakekube.Services, fmt.Sprint("shop/s", i))
			continue
		}
		a.Put(fakekube.Services, svcYAML("shop", fmt.Sprint("s", i), fmt.Sprint("10.0.1.", i+1)))
	}
	wait.Until(t, "all edits have arrived", func() bool {
		c.take()
		return len(c.hosts()) == 13 && c.has("s19", "10.0.1.20")
	})
	late := start(t, onAPI(t, a))
	moved := openNaming(t, late, c)
	moved.want("", "")
	var lines []string
	for name, version := range c.versions {
		lines = append(lines, name+" "+version+"\n")
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "")))
	digest := hex.EncodeToString(sum[:16])
	for _, r := range []running{early, late} {
		wait.Until(t, "the replica shows its client up to date", func() bool {
			all := slices.Collect(r.Agents(""))
			if len(all) != 1 || all[0].Hosts != 13 || all[0].ServedDigest != digest {
				t.Fatalf("agents %+v, want one with 13 hosts and the digest %s", all, digest)
			}
			return all[0].Current && all[0].Digest == digest
		})
	}
}
