package interop

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/test/machines/lab"
)

var (
	randomSeed   = flag.Uint64("interop.seed", 0, "of the objects of TestRandomObjects; 0 for a new one")
	randomRounds = flag.Int("interop.rounds", 500, "rounds of TestRandomObjects")
	// randomObjects are the texts of random objects.
	//
	//go:embed testdata/random.yaml
	randomObjects string
)

// A world is the random objects of a cluster.
type world struct {
	*rand.Rand
	c       *lab.Cluster
	texts   map[string][]string
	objects map[string]string // by kind, name and namespace
	refused int               // by the API server
}

func pick[T any](w *world, choices ...T) T { return choices[w.IntN(len(choices))] }

var word = regexp.MustCompile(`<\w+>`)

// text returns one of the texts of a word, with a text for each word in it.
func (w *world) text(name string, fixed map[string]string) string {
	if text, is := fixed[name]; is {
		return text
	}
	return word.ReplaceAllStringFunc(pick(w, w.texts[name]...), func(in string) string { return w.text(in[1:len(in)-1], fixed) })
}

// edit writes or removes an object.
func (w *world) edit() {
	number := w.IntN(len(w.texts["tenant"]))
	text := w.text("object", map[string]string{"ns": w.texts["tenant"][number], "n": strconv.Itoa(number + 1)})
	o := w.c.Parse(text)[0]
	key := o.Kind + " " + o.Metadata.Name + "." + o.Metadata.Namespace
	was, there := w.objects[key]
	remove := w.IntN(4) == 0 && o.Kind != "Namespace"
	if remove {
		if there {
			w.c.Remove(was)
			delete(w.objects, key)
		}
		return
	}
	if err := w.c.TryApply(text); err != nil {
		w.refused++
		return
	}
	w.objects[key] = text
}

// rootNamespace is what the settings of the mesh say.
var rootNamespace = regexp.MustCompile(`rootNamespace: (\w+)`)

// root returns the root namespace.
func (w *world) root() string {
	if set := rootNamespace.FindStringSubmatch(w.objects["ConfigMap istio.istio-system"]); set != nil {
		return set[1]
	}
	return "istio-system"
}

// mark writes an object of each kind after all others, in a namespace of its own, and returns what is then its table.
func (w *world) mark(round int) string {
	number, seen := fmt.Sprintf("%d.%d", round/250, 1+round%250), pick(w, "even.mark", "odd.mark")
	text := w.text("marked", map[string]string{"round": number, "seen": seen})
	if round > 0 {
		service, _, _ := strings.Cut(text, "---")
		w.c.Remove(service)
	}
	w.c.Apply(text)
	return fmt.Sprintf("+ db.mark.svc.cluster.local [192.1.%s] Kubernetes db.mark\n+ %s [192.2.%s] External\n"+
		"+ web.mark.svc.cluster.local [10.96.20%s] Kubernetes web.mark", number, seen, number, number)
}

// A viewer is a workload that asks control planes for its table.
type viewer struct{ namespace, app, addresses, vips string }

// tables returns the tables of a viewer from two control planes, at ports in the cluster. Automatic VIPs are "VIP4" and "VIP6".
func (v viewer) tables(c *lab.Cluster, istiod, nametap string) (a, b lab.Table) {
	c.TB.Helper()
	var both errgroup.Group
	both.Go(func() (err error) { a, err = v.table(c, istiod); return err })
	both.Go(func() (err error) { b, err = v.table(c, nametap); return err })
	if err := both.Wait(); err != nil {
		c.TB.Fatal(err)
	}
	return a, b
}

// table connects, because a connection to nametap-discovery ends after 100 streams.
func (v viewer) table(c *lab.Cluster, port string) (lab.Table, error) {
	conn, err := grpc.NewClient("passthrough:127.0.0.1:"+port, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) { return c.Dial(ctx, "tcp", address) }))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	metadata := map[string]any{"NAMESPACE": v.namespace, "INSTANCE_IPS": v.addresses, "CLUSTER_ID": "Kubernetes", "LABELS": map[string]any{"app": v.app}}
	for name := range strings.FieldsSeq(v.vips) {
		metadata[name] = "true"
	}
	s, err := structpb.NewStruct(metadata)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(c.TB.Context(), time.Minute)
	defer cancel()
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err != nil {
		return nil, err
	}
	address, _, _ := strings.Cut(v.addresses, ",")
	node := &corev3.Node{Id: "sidecar~" + address + "~pod." + v.namespace + "~" + v.namespace + ".svc.cluster.local", Metadata: s}
	_ = stream.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: "type.googleapis.com/istio.networking.nds.v1.NameTable"}) // Recv has the error
	response, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	var sent api.NameTable
	if err := response.GetResources()[0].UnmarshalTo(&sent); err != nil {
		return nil, err
	}
	table := lab.Table{}
	for host, e := range sent.GetTable() {
		for i, ip := range e.GetIps() {
			if strings.HasPrefix(ip, "240.") {
				e.Ips[i] = "VIP4"
			} else if strings.HasPrefix(ip, "2001:2:") {
				e.Ips[i] = "VIP6"
			}
		}
		table[host] = lab.Entry{IPs: set(e.GetIps()), Registry: e.GetRegistry(), Shortname: e.GetShortname(), Namespace: e.GetNamespace(), Alias: e.GetAlias()}
	}
	return table, nil
}

// set returns texts sorted and without duplicates.
func set(texts []string) []string { return slices.Compact(slices.Sorted(slices.Values(texts))) }

// A difference is what the tables of a viewer have for a host, in any case. Without an entry, its registry is empty.
type difference struct {
	w               *world
	v               viewer
	host            string
	istiod, nametap lab.Entry
}

// added reports whether only nametap-discovery has an entry, and it is a Service's.
func (d *difference) added() bool {
	return d.istiod.Registry == "" && d.nametap.Registry == "Kubernetes"
}

// lacking are the addresses that only istiod sends, and meant are the other differences: docs/discovery-reference.md has the
// reasons.
var (
	lacking = []struct {
		name  string
		lacks func(d *difference, ip string) bool
	}{
		{"an automatic VIP without request", func(d *difference, ip string) bool { return isVIP(ip) && d.v.vips == "DNS_CAPTURE" }},
		{"an automatic VIP beside addresses", func(d *difference, ip string) bool { return isVIP(ip) && len(d.nametap.IPs) > 0 && !d.automatic() }},
		{"an address that is nobody's", func(_ *difference, ip string) bool { return ip == "::" || ip == "224.0.0.1" }},
		{"an endpoint of another family", func(d *difference, ip string) bool {
			return d.istiod.Registry == "Kubernetes" && !strings.Contains(d.v.addresses, dots(ip))
		}},
	}
	meant = []struct {
		name string
		is   func(d *difference) bool
	}{
		{"an ExternalName", func(d *difference) bool { return d.added() && d.nametap.Alias != "" }},
		{"a Service without an address", func(d *difference) bool { return d.added() && len(d.nametap.IPs) == 0 }},
		{"a headless Service without its first port", func(d *difference) bool {
			return d.added() && (d.nametap.Shortname == "bare" || d.nametap.Shortname == "odd")
		}},
		{"endpoints for IPv6 only, or that istiod has lost", func(d *difference) bool {
			return d.nametap.Shortname == "db" && d.istiod.Registry != "External" && subset(d.istiod.IPs, d.nametap.IPs)
		}},
		{"endpoints that istiod does not follow", func(d *difference) bool {
			return d.istiod.Registry == "Kubernetes" && strings.Contains(d.w.objects["Service "+d.nametap.Shortname+"."+d.nametap.Namespace], "~")
		}},
		{"an endpoint without a Pod", func(d *difference) bool { return d.added() && strings.HasPrefix(d.nametap.Shortname, "pod-") }},
		{"another revision", func(d *difference) bool { return d.host == "rev.example" }},
		{"a host that is written in several ways", func(d *difference) bool {
			return (d.host == "case.example" || d.host == "dot.example") && oneOwner(d.nametap.IPs)
		}},
		{"a name that belongs to Services", func(d *difference) bool {
			return d.reserved() && (d.nametap.Registry == "Kubernetes" || d.mayHave(d.nametap.Namespace))
		}},
		{"an automatic VIP that istiod fails to write", func(d *difference) bool { return d.istiod.Registry == "" && d.automatic() }},
		{"several addresses of a host that a Sidecar names", func(d *difference) bool {
			return d.sidecar("/"+d.host+`"`) && d.istiod.Registry != "Kubernetes" && subset(d.istiod.IPs, d.nametap.IPs) && oneOwner(d.nametap.IPs)
		}},
		{"an owner for each listener", func(d *difference) bool {
			return d.sidecar("]}, {") && d.istiod.Registry == "External" && subset(d.nametap.IPs, d.istiod.IPs) && oneOwner(d.nametap.IPs)
		}},
	}
)

// explain removes what is known of a difference, counts it, and reports whether nothing is left.
func (d *difference) explain(count map[string]int) bool {
	for _, l := range lacking {
		kept := slices.DeleteFunc(slices.Clone(d.istiod.IPs), func(ip string) bool { return l.lacks(d, ip) && !slices.Contains(d.nametap.IPs, ip) })
		if len(kept) < len(d.istiod.IPs) {
			count[l.name]++
			if d.istiod.IPs = kept; len(kept) == 0 {
				d.istiod = lab.Entry{}
			}
		}
	}
	equal := d.istiod.String() == d.nametap.String()
	for _, m := range meant {
		if !equal && m.is(d) {
			count[m.name]++
			equal = true
		}
	}
	return equal
}

// sidecar reports whether a Sidecar that may select the viewer has a text.
func (d *difference) sidecar(part string) bool {
	for key, text := range d.w.objects {
		_, namespace, _ := strings.Cut(key, ".")
		if strings.HasPrefix(key, "Sidecar ") && (namespace == d.v.namespace || namespace == d.w.root()) && strings.Contains(text, part) {
			return true
		}
	}
	return false
}

// ofTenant are the parts of an address that its namespace has.
var ofTenant = regexp.MustCompile(`^(?:198\.51\.|203\.0\.|2001:db8:5)(\d)[.:]`)

// oneOwner reports whether addresses are of one namespace.
func oneOwner(ips []string) bool {
	owners := map[string]bool{}
	for _, ip := range ips {
		if of := ofTenant.FindStringSubmatch(ip); of != nil {
			owners[of[1]] = true
		}
	}
	return len(owners) < 2
}

// automatic reports whether nametap-discovery has automatic VIPs only.
func (d *difference) automatic() bool {
	return len(d.nametap.IPs) > 0 && !slices.ContainsFunc(d.nametap.IPs, func(ip string) bool { return !isVIP(ip) })
}

func subset(some, all []string) bool {
	return !slices.ContainsFunc(some, func(one string) bool { return !slices.Contains(all, one) })
}

// dots returns the separator of an address.
func dots(ip string) string {
	if strings.Contains(ip, ":") {
		return ":"
	}
	return "."
}

func isVIP(ip string) bool { return strings.HasPrefix(ip, "VIP") }

// reserved reports whether ServiceEntries have the host, and its name belongs to Services.
func (d *difference) reserved() bool {
	for key, text := range d.w.objects {
		if strings.HasPrefix(key, "ServiceEntry ") && strings.Contains(text, `"`+d.host+`"`) {
			name := strings.TrimPrefix(d.host, "*.")
			return strings.HasSuffix(name, ".svc") || strings.HasSuffix(name, "cluster.local") || !strings.Contains(name, ".")
		}
	}
	return false
}

// mayHave reports whether a ServiceEntry of a namespace may have the host, whose name belongs to Services.
func (d *difference) mayHave(namespace string) bool {
	labels := strings.Split(strings.TrimSuffix(d.host, ".cluster.local"), ".")
	named := d.v.namespace
	if len(labels) > 1 {
		named = labels[len(labels)-2]
	}
	return d.nametap.Registry == "" || namespace == named || namespace == d.w.root()
}

// compare returns the differences of two tables that are not known, and counts those that are.
func (w *world) compare(v viewer, istiod, nametap lab.Table, count map[string]int) (unknown []string) {
	hosts := map[string]*difference{}
	at := func(host string) *difference {
		key := strings.TrimSuffix(strings.ToLower(host), ".")
		if hosts[key] == nil {
			hosts[key] = &difference{w: w, v: v, host: key}
		}
		return hosts[key]
	}
	for host, e := range nametap {
		at(host).nametap = e
	}
	for host, e := range istiod {
		at(host).istiod = e
	}
	for _, d := range hosts {
		if was := d.istiod; !d.explain(count) {
			unknown = append(unknown, fmt.Sprintf("%s: istiod [%v] nametap-discovery %v", d.host, was, d.nametap))
		}
	}
	return unknown
}

// D2, D11, D12, D13, D65: while random objects change, the tables of nametap-discovery and istiod are equal for workloads of
// all namespaces, but for the known differences.
func TestRandomObjects(t *testing.T) {
	c := newCluster(t, "")
	seed := *randomSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("ARGS='-run=TestRandomObjects -interop.seed=%d' repeats the objects", seed)
	w := &world{Rand: rand.New(rand.NewPCG(seed, 0)), c: c, objects: map[string]string{}}
	if err := yaml.Unmarshal([]byte(randomObjects), &w.texts); err != nil {
		t.Fatal(err)
	}
	for _, tenant := range append(w.texts["tenant"], "mark") {
		c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + tenant + "}\n")
	}
	d := c.Istiod(lab.IstiodOptions{ // it reads the ConfigMap, and does not wait long for more changes
		Args: []string{"--meshConfig", c.Path("absent.yaml")},
		Env:  []string{"ISTIO_DUAL_STACK=true", "PILOT_DEBOUNCE_AFTER=10ms", "PILOT_MAX_REQUESTS_PER_SECOND=10000"},
	})
	discovery(c, "--max-clients=1000000", "--max-clients-per-address=1000000")
	istiod := d.Port(15010)
	count, began := map[string]int{}, time.Now()
	for round := range *randomRounds {
		edits := 1 + w.IntN(8)
		if round == 0 {
			edits = 100
		}
		for range edits {
			w.edit()
		}
		want := w.mark(round)
		lab.Until(t, "both control planes have all objects", func() bool {
			a, b := viewer{namespace: "mark", addresses: "10.0.0.1"}.tables(c, istiod, discoveryPort)
			return lab.Table{}.Diff(a) == want && lab.Table{}.Diff(b) == want
		})
		for range 8 {
			v := viewer{
				pick(w, w.texts["tenant"]...), pick(w, "narrow", "wide"), pick(w, "10.0.0.1", "fd00::1", "10.0.0.1,fd00::1"),
				pick(w, "", "DNS_CAPTURE", "DNS_CAPTURE DNS_AUTO_ALLOCATE"),
			}
			var unknown []string
			seen := map[string]int{}
			for end := time.Now().Add(3 * time.Second); ; {
				a, b := v.tables(c, istiod, discoveryPort)
				clear(seen)
				unknown = w.compare(v, a, b, seen)
				if len(unknown) == 0 || time.Now().After(end) {
					break
				}
				time.Sleep(50 * time.Millisecond) //nolint:forbidigo // some changes, as of settings, come after the marked objects
			}
			for name, n := range seen {
				count[name] += n
			}
			if len(unknown) > 0 {
				objects := c.Write(fmt.Sprintf("round-%d.yaml", round), strings.Join(slices.Sorted(maps.Values(w.objects)), "\n---\n"))
				t.Errorf("round %d, %v, with the objects in %s:\n%s", round, v, objects, strings.Join(unknown, "\n"))
			}
		}
	}
	t.Logf("%d rounds with %d tables in %v, %d objects refused; known differences:", *randomRounds, 8**randomRounds, time.Since(began), w.refused)
	for _, name := range slices.Sorted(maps.Keys(count)) {
		t.Logf("%7d  %s", count[name], name)
	}
}
