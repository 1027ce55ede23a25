package interop

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// docs/performance.md has the flags for its figures.
var (
	services  = flag.Int("interop.services", 2000, "Services of TestScale")
	editCount = flag.Int("interop.edits", 100, "edits of each kind that TestScale measures")
	editRate  = flag.Int("interop.rate", 500, "edits a second while TestScale measures others")
	churnFor  = flag.Duration("interop.churn", 10*time.Second, "how long these last")
)

const (
	// scaleNamespaces is the number of namespaces with Services, and endpoints of endpoints of a Service.
	scaleNamespaces, endpoints = 20, 10
	// edited is the wanted time from an edit to the first answer that shows it.
	edited = 150 * time.Millisecond
	hidden = "~" // the exportTo of a Service that no workload sees
)

// A population is a number of Services with their EndpointSlices at an API server. Each is a function of its number, so
// that a test knows it without asking. One of ten is headless. The Services have no selectors, so Kubernetes' controllers
// leave them alone.
type population struct{ c *lab.Cluster }

func scaleNamespace(i int) string { return fmt.Sprintf("scale-%02d", i%scaleNamespaces) }
func scaleName(i int) string      { return fmt.Sprintf("app-%05d", i) }
func headless(i int) bool         { return i/scaleNamespaces%10 == 0 }

// The first Services of each kind, which are edited.
const firstHeadless, firstService = 0, scaleNamespaces * 1

func scaleHost(i int) string {
	return scaleName(i) + "." + scaleNamespace(i) + ".svc.cluster.local"
}

// addresses returns the addresses of a Service: its cluster IP, or of its endpoints, which each version has others of.
func addresses(i, version int) []string {
	if !headless(i) {
		return []string{netip.AddrFrom4([4]byte{10, 96, byte(16 + i/250), byte(1 + i%250)}).String()}
	}
	var all []string
	for number := range endpoints {
		n := i*endpoints + number
		all = append(all, netip.AddrFrom4([4]byte{10, byte(128 + version%8*8 + n>>16), byte(n >> 8), byte(n)}).String())
	}
	return all
}

// answer returns the answer for a Service, as [lab.Client.Ask] does.
func answer(i, version int) string {
	return strings.Join(slices.Sorted(slices.Values(addresses(i, version))), " ")
}

// serviceObject returns a Service; exportTo is empty for one that all workloads see.
func serviceObject(i int, exportTo string) (path, object string) {
	ip := addresses(i, 0)[0]
	if headless(i) {
		ip = "None"
	}
	annotations := ""
	if exportTo != "" {
		annotations = `"networking.istio.io/exportTo":"` + exportTo + `"`
	}
	return "/api/v1/namespaces/" + scaleNamespace(i) + "/services", fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":%[1]q,"namespace":%[2]q,"labels":{"app":%[1]q},"annotations":{%[3]s}},
"spec":{"clusterIP":%[4]q,"ports":[{"name":"http","port":80,"targetPort":8080},{"name":"metrics","port":9090,"targetPort":9090}]}}`, scaleName(i), scaleNamespace(i), annotations, ip)
}

// sliceObject returns the EndpointSlice of a Service. There are no Pods, and istiod skips endpoints whose Pod is missing, so
// it refers to none.
func sliceObject(i, version int) (path, object string) {
	label, list := "", []string{}
	if headless(i) {
		label = `,"service.kubernetes.io/headless":""`
	}
	for number, address := range addresses(i, version) {
		host := ""
		if headless(i) {
			host = fmt.Sprintf(`"hostname":"%s-%d",`, scaleName(i), number)
		}
		list = append(list, fmt.Sprintf(`{"addresses":[%q],%s"conditions":{"ready":true,"serving":true},"nodeName":"node-%d"}`, address, host, (i+number)%500))
	}
	return "/apis/discovery.k8s.io/v1/namespaces/" + scaleNamespace(i) + "/endpointslices", fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"IPv4",
"metadata":{"name":%[1]q,"namespace":%[2]q,"labels":{"kubernetes.io/service-name":%[1]q%[3]s}},"ports":[{"name":"http","port":8080,"protocol":"TCP"}],"endpoints":[%[4]s]}`,
		scaleName(i), scaleNamespace(i), label, strings.Join(list, ","))
}

// put replaces an object.
func (p population) put(i int, path, object string) error {
	return p.c.Do(http.MethodPut, path+"/"+scaleName(i), json.RawMessage(object), nil)
}

// create creates all objects, several at a time.
func (p population) create() {
	p.c.TB.Helper()
	begun := time.Now()
	for i := range scaleNamespaces {
		p.c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + scaleNamespace(i) + "}\n")
		account(p.c, scaleNamespace(i), "default")
	}
	p.c.ControllerManager.End(syscall.SIGTERM) // it has no more to do
	var group sync.WaitGroup
	var failed atomic.Pointer[error]
	for worker := range 16 {
		group.Go(func() {
			for i := worker; i < *services; i += 16 {
				for _, make := range []func() (string, string){
					func() (string, string) { return serviceObject(i, "") }, func() (string, string) { return sliceObject(i, 0) },
				} {
					path, object := make()
					if err := p.c.Do(http.MethodPost, path, json.RawMessage(object), nil); err != nil {
						failed.Store(&err)
					}
				}
			}
		})
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		p.c.TB.Fatal(*err)
	}
	p.c.TB.Logf("created %d Services with %d endpoints in %v", *services, *services*endpoints, time.Since(begun).Round(time.Second))
}

// table returns the table of a workload. pods is true if endpoints have hosts; istiod takes these from Pods.
func (p population) table(pods bool) lab.Table {
	t := lab.Table{}
	for i := range *services {
		add := func(shortname string, ips ...string) {
			slices.Sort(ips)
			t[shortname+"."+scaleNamespace(i)+".svc.cluster.local"] = lab.Entry{IPs: ips, Registry: "Kubernetes", Shortname: shortname, Namespace: scaleNamespace(i)}
		}
		add(scaleName(i), addresses(i, 0)...)
		for number, address := range addresses(i, 0) {
			if headless(i) && pods {
				add(fmt.Sprintf("%s-%d.%s", scaleName(i), number, scaleName(i)), address)
			}
		}
	}
	return t
}

// wantTable waits until an agent's table has the hosts of the population.
func (p population) wantTable(t *testing.T, a *lab.Agent, pods bool) {
	t.Helper()
	var diff string
	defer func() {
		if diff != "" {
			t.Errorf("the API server (-) and the agent (+) have different tables:\n%.2000s", diff)
		}
	}()
	want := p.table(pods)
	wait.Until(t, "the agent's table matches the API server", func() bool {
		got := a.Table()
		for host, e := range got {
			if !strings.HasPrefix(e.Namespace, "scale-") {
				delete(got, host)
			}
		}
		diff = want.Diff(got)
		return diff == ""
	})
}

// edit edits a Service, or the endpoints of a headless one, for the nth time; each edit differs from the previous one. It
// returns the answer that shows it.
func (p population) edit(i, n int) (want string, err error) {
	if headless(i) {
		path, object := sliceObject(i, n)
		return answer(i, n), p.put(i, path, object)
	}
	exportTo := [2]string{"", hidden}[n%2]
	path, object := serviceObject(i, exportTo)
	return map[string]string{"": answer(i, 0), hidden: "NXDOMAIN"}[exportTo], p.put(i, path, object)
}

// A span is a set of measured times.
type span []time.Duration

// at returns the time that a share of the times is not above.
func (s span) at(share float64) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}

func (s span) String() string {
	return fmt.Sprintf("p50 %v, p99 %v, at most %v (of %d)", s.at(0.5), s.at(0.99), s.at(1), len(s))
}

// measure edits a Service 2n times, and returns how long after the API server's answer an agent's answer shows an edit.
func (p population) measure(t *testing.T, client lab.Client, i, n int) span {
	t.Helper()
	var s span
	for round := range 2 * n { // the last one is as the first
		want, err := p.edit(i, (round+1)%2)
		if err != nil {
			t.Fatal(err)
		}
		written := time.Now()
		for client.Ask(scaleHost(i), "A") != want {
			if time.Since(written) > time.Minute {
				t.Fatalf("%s is not %s", scaleHost(i), want)
			}
		}
		s = append(s, time.Since(written))
	}
	return s
}

// TestScale runs nametap-discovery, and then istiod, with many Services. It logs the memory, the processor time and the
// times that they take.
func TestScale(t *testing.T) { // D3, D15, D16, D19
	c := newCluster(t, objects)
	p := population{c}
	p.create()
	t.Run("nametap-discovery", func(t *testing.T) { population{c.In(t)}.testDiscovery(t) })
	t.Run("istiod", func(t *testing.T) {
		c := c.In(t)
		begun := time.Now()
		i := c.Istiod(lab.IstiodOptions{})
		population{c}.testPlane(t, i.Process, begun, i.Port(15010), false)
	})
}

// testPlane measures a control plane that has just started, with an agent whose host it returns.
func (p population) testPlane(t *testing.T, d *lab.Process, begun time.Time, port string, discovery bool) (*host, *lab.Agent) { //nolint:revive // its callers have measured it all
	t.Logf("ready after %v, which took %v of a processor: %d KiB resident, %d anonymous", time.Since(begun).Round(time.Millisecond), d.Processor(), d.Resident(), d.Anonymous())
	h := newHost(p.c, onlyIPv4)
	a := h.agent("scale", scaleNamespace(0), h.plain(port)...)
	p.wantTable(t, a, discovery)
	t.Logf("with an agent: %d KiB resident", d.Resident())
	client := h.Connect(lab.AgentDNS)
	defer client.Close()
	for _, i := range []int{firstService, firstHeadless} {
		used, n := d.Processor(), *editCount
		if !discovery {
			n /= 5
		}
		s := p.measure(t, client, i, n)
		t.Logf("an edit of %s is seen %v after the API server's answer; %v of a processor each", scaleHost(i), s, (d.Processor()-used)/time.Duration(len(s)))
		if discovery && s.at(0.5) > edited {
			t.Errorf("half of the edits are seen after more than %v", edited)
		}
	}
	used, pushes := d.Processor(), h.Metric(lab.AgentStatus, "nametap_xds_pushes_total")
	p.c.APIServer.End(syscall.SIGKILL) // so that its watch cache has no old versions, and clients must list
	since := time.Now()
	p.c.StartAPIServer()
	ready := time.Now()
	if discovery {
		wait.Until(t, "nametap-discovery has read all objects again", func() bool {
			return !slices.ContainsFunc(heard(t, p.c), func(r resource) bool { return r.Failure != "" || r.Heard.Before(since) })
		})
		if now := h.Metric(lab.AgentStatus, "nametap_xds_pushes_total"); now != pushes {
			t.Errorf("the agent was sent %v pushes, although nothing has changed", now-pushes)
		}
	} else {
		p.measure(t, client, firstService, 1)
	}
	t.Logf("reads all objects again: %v after the API server is ready, which took %v of a processor; peak %d KiB", time.Since(ready).Round(time.Millisecond), d.Processor()-used, d.Peak())
	p.wantTable(t, a, discovery)
	return h, a
}

// A resource is what nametap-discovery reads.
type resource struct {
	Failure string
	Heard   time.Time
}

// heard returns the state of the resources that nametap-discovery reads.
func heard(t *testing.T, c *lab.Cluster) (all []resource) {
	t.Helper()
	_, text := c.Place.Get("http://" + discoveryStatus + "/debug/objects")
	if err := json.Unmarshal([]byte(text), &all); err != nil || len(all) == 0 {
		t.Fatalf("%v: %s", err, text)
	}
	return all
}

// testDiscovery measures nametap-discovery. While others are edited, it builds at most every 30 ms, and an edit shows
// within a second.
func (p population) testDiscovery(t *testing.T) {
	begun := time.Now()
	d := discovery(p.c)
	h, a := p.testPlane(t, d, begun, discoveryPort, true)

	t.Run("edits of others", func(t *testing.T) {
		builds := func() float64 { return p.c.Metric(discoveryStatus, "nametap_discovery_builds_total") }
		before, used, begun := builds(), d.Processor(), time.Now()
		var edits atomic.Int64
		done := make(chan struct{})
		var group sync.WaitGroup
		const writers = 8
		for range writers {
			group.Go(func() {
				for next := begun; ; next = next.Add(writers * time.Second / time.Duration(*editRate)) {
					select {
					case <-done:
						return
					case <-time.After(time.Until(next)):
					}
					i := scaleNamespaces*2 + rand.IntN(*services-scaleNamespaces*2) //nolint:gosec // a test's choice
					if _, err := p.edit(i, int(edits.Add(1))); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		client := h.Connect(lab.AgentDNS)
		defer client.Close()
		var delays span
		for time.Since(begun) < *churnFor {
			delays = append(delays, p.measure(t, client, firstService, 1)...)
		}
		close(done)
		group.Wait()
		lasted, built := time.Since(begun), builds()-before
		t.Logf("%d edits and %v builds in %v, %v of a processor; an edit of another Service is seen after %v", edits.Load(), built, lasted, d.Processor()-used, delays)
		if built > float64(lasted/(30*time.Millisecond)+1) {
			t.Errorf("%v builds in %v", built, lasted)
		}
		if worst := delays.at(1); worst > time.Second {
			t.Errorf("an edit is seen after %v, want at most a second", worst)
		}
		for i := range *services { // as in the beginning
			if _, err := p.edit(i, 0); err != nil {
				t.Fatal(err)
			}
		}
		p.wantTable(t, a, true)
	})
}
