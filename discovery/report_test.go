package discovery

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// D64: the errors in the objects of one namespace do not make the changes of others expensive, and are shown when they
// change.
func TestChangesBesideManyErrors(t *testing.T) {
	const broken, edits = 5000, 20
	a := fakekube.Start(t)
	wrong := `{metadata: {name: s%d, namespace: evil, annotations: {networking.istio.io/exportTo: "` + strings.Repeat("=", 400) + `"}}, apiVersion: v1, kind: Service, spec: {clusterIP: 10.0.0.9}}`
	for i := range broken {
		a.Put(fakekube.Services, fmt.Sprintf(wrong, i))
	}
	r := start(t, onAPI(t, a))
	c := openDelta(t, r, node(t, "shop"), nil)
	c.next()
	wait.Until(t, "all errors are known", func() bool { return len(r.Errors()) == broken })
	before := totalAlloc()
	for i := range edits {
		a.Put(fakekube.Services, svcYAML("shop", "web", fmt.Sprintf("10.0.0.%d", i+1)))
		c.next()
	}
	// A line about a further error is logged once a second, and costs 6 MiB.
	if each := (totalAlloc() - before) / edits; each > 2<<20 {
		t.Errorf("a change allocated %d KiB beside %d errors", each>>10, broken)
	}
	a.Put(fakekube.Services, svcYAML("evil", "s0", "10.0.0.9"))
	wait.Until(t, "a repair is seen", func() bool { return len(r.Errors()) == broken-1 })
	a.Put(fakekube.Services, fmt.Sprintf(wrong, broken))
	wait.Until(t, "a new error is seen", func() bool { return len(r.Errors()) == broken })
	a.Remove(fakekube.Services, "evil/s1")
	wait.Until(t, "a removal is seen", func() bool { return len(r.Errors()) == broken-1 })
}

// totalAlloc returns how many bytes were allocated so far.
func totalAlloc() uint64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.TotalAlloc
}
