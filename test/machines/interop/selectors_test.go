package interop

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	manyNamespaces = 50
	manyServices   = 100 // in each namespace
	useSelectors   = "discoverySelectors: [{matchLabels: {mesh: enabled}}]\n"
)

// D13: the objects of namespaces that are not selected need no memory, and a namespace that is selected
// later is in use soon, with 5,000 Services of which 500 are selected.
func TestManyNamespaces(t *testing.T) {
	c := newCluster(t)
	c.createMany()
	c.setMesh(useSelectors)
	d := c.discovery()
	selected := d.memory()
	if selected.services != manyServices*manyNamespaces/10 {
		t.Errorf("%v Services are in use", selected.services)
	}
	times := d.selectAndUnselect()
	t.Logf("a namespace of %d Services is in use after p50 %v, at most %v; unused after at most %v", manyServices,
		times[0][len(times[0])/2], slices.Max(times[0]), slices.Max(times[1]))
	d.process.end(terminate)
	d.start()
	again := d.memory()
	d.process.end(terminate)
	c.setMesh("")
	d.start()
	all := d.memory()
	if all.services != manyNamespaces*manyServices+1 {
		t.Errorf("%v Services are in use without selectors", all.services)
	}
	t.Logf("with %v of %v Services: %v, after a restart %v, with all %v", selected.services, all.services, selected, again, all)
}

// createMany creates namespaces, a tenth of them selected, with Services.
func (c *cluster) createMany() {
	c.tb.Helper()
	var creating sync.WaitGroup
	for worker := range 4 {
		creating.Go(func() {
			for n := worker; n < manyNamespaces; n += 4 {
				name := fmt.Sprintf("many-%02d", n)
				c.create("/api/v1/namespaces", fmt.Sprintf(`{"metadata":{"name":%q,"labels":{"mesh":%q}}}`, name, meshLabel(n%10 == 0)))
				for i := range manyServices {
					c.create("/api/v1/namespaces/"+name+"/services", fmt.Sprintf(
						`{"metadata":{"name":"web-%d","labels":{"app":"web","team":"shop"}},"spec":{"selector":{"app":"web"},"ports":[{"name":"http","port":80}]}}`, i))
				}
			}
		})
	}
	creating.Wait()
}

// meshLabel returns the value of the label of a namespace.
func meshLabel(selected bool) string {
	if selected {
		return "enabled"
	}
	return "disabled"
}

// create creates an object.
func (c *cluster) create(path, text string) {
	if status, answer := c.try(http.MethodPost, path, "application/json", []byte(text)); status != http.StatusCreated {
		c.tb.Errorf("%s: status %d: %s", path, status, answer)
	}
}

// selectAndUnselect changes the label of namespaces, and returns after which times an agent had their
// hosts, and had them no longer.
func (d *discovery) selectAndUnselect() (times [2][]time.Duration) {
	d.tb.Helper()
	m := d.machine(onlyIPv4)
	m.agent(pod{"many", "many-00"}, m.discoveryFlags()...)
	client := m.connect(dnsAddr)
	defer client.Close()
	for n := 1; n < 10; n++ {
		namespace := fmt.Sprintf("many-%02d", n)
		for i, selected := range []bool{true, false} {
			begun := time.Now()
			d.apply(fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: %s, labels: {mesh: %s}}\n", namespace, meshLabel(selected)))
			wait.Until(d.tb, namespace+" is "+meshLabel(selected), func() bool {
				return (client.ask("web-7."+namespace+".svc.cluster.local", "A") != "NXDOMAIN") == selected
			})
			times[i] = append(times[i], time.Since(begun).Round(time.Millisecond))
		}
		if got := client.ask("web-7.many-00.svc.cluster.local", "A"); got == "NXDOMAIN" {
			d.tb.Error("the Service of a namespace that stays selected is lost")
		}
	}
	return times
}

// A usage is the memory of nametap-discovery, and the number of Services in use.
type usage struct {
	resident, heap int // MiB
	services       float64
}

// String returns the memory.
func (u usage) String() string {
	return fmt.Sprintf("%d MiB resident, %d MiB heap", u.resident, u.heap)
}

// memory returns what the metrics say.
func (d *discovery) memory() usage {
	d.tb.Helper()
	response, err := d.client.Get("http://" + discoveryStatus + "/metrics")
	if err != nil {
		d.tb.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		d.tb.Fatal(err)
	}
	value := func(name string) float64 {
		match := regexp.MustCompile("(?m)^" + regexp.QuoteMeta(name) + " (.*)$").FindSubmatch(text)
		if match == nil {
			d.tb.Fatalf("there is no %s", name)
		}
		v, err := strconv.ParseFloat(string(match[1]), 64)
		if err != nil {
			d.tb.Fatal(err)
		}
		return v
	}
	return usage{
		int(value("process_resident_memory_bytes")) >> 20, int(value("go_memstats_heap_inuse_bytes")) >> 20,
		value(`nametap_discovery_resource_objects{cluster="",resource="services"}`),
	}
}
