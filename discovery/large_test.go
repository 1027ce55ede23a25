package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// list returns n elements, separated by commas. The first argument of the format is the number of the element.
func list(n int, format string, args ...any) string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf(format, append([]any{i}, args...)...)
	}
	return strings.Join(all, ",")
}

// D64: a host of several objects is bounded, too. It is left out, and named, until it has less.
func TestLargeHost(t *testing.T) {
	a, log := fakekube.Start(t), testlog.New(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	for e := range 10 {
		a.Put(fakekube.ServiceEntries, fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e%d, namespace: evil}, "+
			"spec: {hosts: [api.example.com], addresses: [%s]}}", e, list(12000, "'2001:db8:1111:2222:3333:4444:%[2]x:%[1]x'", e)))
	}
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	c := openDelta(t, start(t, cfg), node(t, "shop"), nil)
	want := func(hosts int) {
		t.Helper()
		c.next()
		if table := merged(t, c.state()).GetTable(); len(table) != hosts || table["web.shop.svc.cluster.local"] == nil {
			t.Fatalf("the table has %d hosts, want %d", len(table), hosts)
		}
	}
	want(1)
	wait.Until(t, "the log names the host", func() bool { return log.Count("a host has more than 4096 KiB in tables", "api.example.com") == 1 })
	a.Remove(fakekube.ServiceEntries, "evil/e1")
	a.Remove(fakekube.ServiceEntries, "evil/e2")
	want(2)
}
