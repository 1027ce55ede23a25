package interop

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	// changes is the number of times that each kind of change is measured.
	changes = 50
	// soon is the wanted time from the API server's answer to the first query that shows a
	// change. istiod waits for further changes for 100 ms of it (PILOT_DEBOUNCE_AFTER).
	soon = 300 * time.Millisecond
)

// C9: a Service, a ServiceEntry and an endpoint of a headless Service that are created, changed
// or deleted show in a query within 300 ms.
func TestChanges(t *testing.T) {
	d := start(t, options{})
	m := d.machine(onlyIPv4)
	m.agent(pod{"changes", "shop"}, m.plain(d)...)
	c := m.connect(dnsAddr)
	defer c.Close()
	const (
		service  = "apiVersion: v1\nkind: Service\nmetadata: {name: new, namespace: shop%s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n"
		hidden   = ", annotations: {networking.istio.io/exportTo: '~'}"
		headless = "apiVersion: v1\nkind: Service\nmetadata: {name: new-headless, namespace: shop}\nspec: {clusterIP: None, ports: [{port: 80}]}\n"
		slice    = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\nports: [{port: 80}]\n" +
			"metadata: {name: new, namespace: shop, labels: {kubernetes.io/service-name: new-headless}}\n" +
			"endpoints: [{addresses: [%s]}]\n"
	)
	d.apply(headless)
	for _, tc := range []struct {
		name    string
		host    string
		objects [2]string // created, and after the change
		answers [2]string // to a query for the host
	}{
		{"Service", "new.shop.svc.cluster.local", [2]string{fmt.Sprintf(service, "", "10.96.2.1"), fmt.Sprintf(service, hidden, "10.96.2.1")}, [2]string{"10.96.2.1", "NXDOMAIN"}},
		{"ServiceEntry", "new.example.com", [2]string{entryOf("new.example.com", "198.51.100.201"), entryOf("new.example.com", "198.51.100.202")}, [2]string{"198.51.100.201", "198.51.100.202"}},
		{"headless endpoint", "new-headless.shop.svc.cluster.local", [2]string{fmt.Sprintf(slice, "10.244.1.1"), fmt.Sprintf(slice, "10.244.1.2")}, [2]string{"10.244.1.1", "10.244.1.2"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var times [3][]time.Duration
			measure := func(i int, change func(), want string) {
				change()
				begun := time.Now()
				wait.Until(t, tc.host+" is "+want, func() bool { return c.ask(tc.host, "A") == want })
				times[i] = append(times[i], time.Since(begun))
			}
			for range changes {
				measure(0, func() { d.apply(tc.objects[0]) }, tc.answers[0])
				measure(1, func() { d.apply(tc.objects[1]) }, tc.answers[1])
				if tc.answers[1] == "NXDOMAIN" { // let its deletion show
					d.apply(tc.objects[0])
					wait.Until(t, tc.host+" is back", func() bool { return c.ask(tc.host, "A") == tc.answers[0] })
				}
				measure(2, func() { d.remove(tc.objects[0]) }, "NXDOMAIN")
			}
			for i, what := range []string{"creation", "change", "deletion"} {
				slices.Sort(times[i])
				p50, p99 := times[i][changes/2], times[i][changes*99/100]
				t.Logf("%s of a %s: seen after p50 %v, p99 %v, at least %v", what, tc.name, p50.Round(time.Millisecond), p99.Round(time.Millisecond), times[i][0].Round(time.Millisecond))
				if p50 > soon {
					t.Errorf("half of the %ss are seen after more than %v", strings.ToLower(what), soon)
				}
			}
		})
	}
}
