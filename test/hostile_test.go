package test

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// Hostile objects are some that the owner of a namespace may put.
type hostile struct {
	name, resource, kind, spec string
	report                     string   // what the log says of them; empty if they are valid
	more                       []string // specs of further objects
}

// list returns a number of elements of a list in JSON.
func list(n int, element func(i int) string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = element(i)
	}
	return "[" + strings.Join(all, ",") + "]"
}

// hostiles returns the hostile objects. The API server takes objects of up to 1.5 MiB.
func hostiles() []hostile {
	long := strings.Repeat("a123456789.", 20)
	address := func(i int) string { return fmt.Sprintf(`"10.0.%d.%d"`, i>>8, i&255) }
	broken := func(int) string { return `"-"` }
	host := func(i int) string { return fmt.Sprintf(`"h%d.x"`, i) }
	exported := make([]string, 10) // to 100,000 namespaces each
	for n := range exported {
		namespace := func(i int) string { return `"` + strconv.FormatInt(int64(46656+100_000*n+i), 36) + `"` }
		exported[n] = `{"hosts":["a.x"],"addresses":["192.0.2.1"],"exportTo":` + list(100_000, namespace) + `}`
	}
	return []hostile{
		{
			"many ports with many endpoints", fakekube.ServiceEntries, "ServiceEntry",
			`{"resolution":"STATIC","hosts":["a.x"],"ports":` + list(256, func(i int) string { return fmt.Sprintf(`{"number":%d,"name":"p%d"}`, i+1, i) }) +
				`,"endpoints":` + list(4096, func(i int) string { return fmt.Sprintf(`{"address":"%s%d"}`, long, i) }) + `}`,
			"its hosts have 245486 KiB in tables", nil,
		},
		{
			"many hosts with many addresses", fakekube.ServiceEntries, "ServiceEntry",
			`{"hosts":` + list(10_000, host) + `,"addresses":` + list(5000, address) + `}`, "its hosts have 1953125 KiB in tables", nil,
		},
		{
			"many wrong hosts", fakekube.ServiceEntries, "ServiceEntry", `{"hosts":` + list(100_000, broken) + `}`, "there are further errors", nil,
		},
		{
			"many wrong egress hosts", fakekube.Sidecars, "Sidecar", `{"egress":[{"hosts":` + list(100_000, broken) + `}]}`, "there are further errors", nil,
		},
		{
			"a long wrong host", fakekube.ServiceEntries, "ServiceEntry", `{"hosts":["` + strings.Repeat("-", 1<<20) + `"]}`, "want a DNS name", nil,
		},
		{"many namespaces in exportTo", fakekube.ServiceEntries, "ServiceEntry", exported[0], "", exported[1:]},
	}
}

// TestHostileObjects lets the owner of a namespace put objects that cost much more than their bytes. Clients of another
// namespace are sent what changes, also of the same resource, and the memory stays within the limit.
func TestHostileObjects(t *testing.T) { // D64
	t.Parallel()
	for _, one := range hostiles() {
		t.Run(one.name, func(t *testing.T) {
			p := startPlane(t)
			for _, resource := range []string{"serviceentries", "sidecars"} {
				p.api.Put(fakekube.Definitions, "{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: "+resource+".networking.istio.io}}")
			}
			tables := make(chan []byte, 100)
			go func() {
				err := pod{p, "198.19.0.1"}.follow(t.Context(), func(table []byte) bool { tables <- table; return true })
				fmt.Fprintf(p.log, "the stream of a client of another namespace has ended: %v\n", err)
				close(tables)
			}()
			await := func(what, in string) {
				t.Helper()
				for change := []byte(nil); !bytes.Contains(change, []byte(in)); {
					if change = wait.For(t, what, tables); change == nil {
						t.Fatal(p.log)
					}
				}
			}
			entry := func(name string) string {
				return `{"apiVersion":"networking.istio.io/v1","kind":"ServiceEntry","metadata":{"namespace":"shop","name":"` + name + `"},"spec":{"hosts":["` + name + `.shop"],"addresses":["192.0.2.1"]}}`
			}
			p.api.Put(fakekube.ServiceEntries, entry("before"))
			await("the first entry", "before.shop")
			for i, spec := range append([]string{one.spec}, one.more...) {
				p.api.Put(one.resource, fmt.Sprintf(`{"apiVersion":"networking.istio.io/v1","kind":%q,"metadata":{"namespace":"evil","name":"x%d"},"spec":%s}`, one.kind, i, spec))
			}
			p.api.Put(fakekube.ServiceEntries, entry("after"))
			await("an entry of another namespace", "after.shop")
			wait.Until(t, "the object is named in the log", func() bool { return strings.Contains(p.log.String(), one.report) })
			p.put("other", "10.0.0.2")
			await("a Service of another namespace", "other.shop")
			t.Logf("memory %d MiB, log %d bytes", p.peak(), len(p.log.String()))
			if n := p.peak(); n > limitMiB {
				t.Errorf("the control plane had %d MiB, want at most %d", n, limitMiB)
			}
			if n := len(p.log.String()); n > 64<<10 {
				t.Errorf("the log has %d bytes", n)
			}
		})
	}
}
