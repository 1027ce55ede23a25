package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// D64: a host of several objects is bounded, too: a headless Service whose EndpointSlices have different ports, and a host
// of several ServiceEntries. An alias of such a host is left out with it.
func TestLargeHosts(t *testing.T) {
	t.Parallel()
	const slices, endpoints, ports = 20, 200, 100
	a, log := fakekube.Start(t), testlog.New(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, "{apiVersion: v1, kind: Service, metadata: {name: db, namespace: evil}, spec: {clusterIP: None}}")
	a.Put(fakekube.Services, "{apiVersion: v1, kind: Service, metadata: {name: alias, namespace: evil}, spec: {type: ExternalName, externalName: db.evil.svc.cluster.local}}")
	list := func(n int, format string, args ...any) string {
		all := make([]string, n)
		for i := range all {
			all[i] = fmt.Sprintf(format, append([]any{i}, args...)...)
		}
		return strings.Join(all, ",")
	}
	for s := range slices {
		a.Put(fakekube.EndpointSlices, fmt.Sprintf("{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, "+
			"metadata: {name: s%d, namespace: evil, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ''}}, ports: [%s], endpoints: [%s]}",
			s, list(ports, "{name: p%[1]d, port: %[2]d%02[1]d}", 10+s), list(endpoints, "{addresses: ['10.1.%[2]d.%[1]d']}", s)))
	}
	for e := range 20 {
		a.Put(fakekube.ServiceEntries, fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e%d, namespace: evil}, "+
			"spec: {hosts: [api.example.com], resolution: STATIC, addresses: [%s]}}", e, list(6000, "'2001:db8::%[2]x:%[1]x'", e)))
	}
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	r := start(t, cfg)
	c := openDelta(t, r, node(t, "shop"), nil)
	hosts := func() string {
		var all []string
		for _, host := range []string{"web.shop.svc.cluster.local", "db.evil.svc.cluster.local", "alias.evil.svc.cluster.local", "api.example.com"} {
			if merged(t, c.state()).GetTable()[host] != nil {
				all = append(all, host)
			}
		}
		return strings.Join(all, " ")
	}
	c.next()
	if got := hosts(); got != "web.shop.svc.cluster.local" {
		t.Errorf("the table has %s", got)
	}
	for _, host := range []string{"db.evil.svc.cluster.local", "api.example.com"} {
		wait.Until(t, "the log names "+host, func() bool { return log.Count("a host has more than 4096 KiB in tables", host) == 1 })
	}
	for s := 5; s < slices; s++ {
		a.Remove(fakekube.EndpointSlices, fmt.Sprint("evil/s", s))
		a.Remove(fakekube.ServiceEntries, fmt.Sprint("evil/e", s))
	}
	for got, want := "", "web.shop.svc.cluster.local db.evil.svc.cluster.local alias.evil.svc.cluster.local api.example.com"; got != want; got = hosts() {
		c.next()
	}
}
