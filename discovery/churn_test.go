package discovery

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

var (
	churnSeed  = flag.Uint64("churn.seed", 0, "seed of TestChurn; 0 for another one in each run")
	churnSteps = flag.Int("churn.steps", 120, "operations of TestChurn")
)

// A churn is an API server whose objects change, and replicas with clients of all kinds.
type churn struct {
	t        *testing.T
	rand     *rand.Rand
	api      *fakekube.API
	replicas []running
	clients  []*churnClient
	ticks    int
}

func (c *churn) pick(of ...string) string { return of[c.rand.IntN(len(of))] }

func (c *churn) ip() string { return fmt.Sprintf("10.%d.0.%d", c.rand.IntN(3), 1+c.rand.IntN(5)) }

func (c *churn) namespace() string { return c.pick("shop", "data", "other") }

// scope returns an exportTo as YAML of a list.
func (c *churn) scope() string { return c.pick("'*'", "'.'", "shop", "data, shop", "other", "'*'") }

// edit changes an object.
func (c *churn) edit() {
	namespace, name := c.namespace(), c.pick("a", "b", "c", "d", "e", "f")
	switch c.rand.IntN(14) {
	case 0, 1, 2, 3: // also twice in a step, back and forth
		meta := fmt.Sprintf("{name: %s, namespace: %s, annotations: {networking.istio.io/exportTo: \"%s\"}}", name, namespace, strings.ReplaceAll(c.scope(), "'", ""))
		for range 1 + c.rand.IntN(3) {
			c.api.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: "+meta+"\nspec: {clusterIP: "+c.ip()+"}\n")
		}
	case 4:
		target := c.pick("a.shop.svc.cluster.local", "b.data.svc.cluster.local", "API.example.com", "f.other.svc.cluster.local", "x.wild.example.com", "nowhere.example.com")
		c.api.Put(fakekube.Services, fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: %s}\nspec: {type: ExternalName, externalName: %s}\n", name, namespace, target))
	case 5:
		c.remove(fakekube.Services, namespace+"/"+name)
	case 6, 7:
		hosts := c.pick("api.example.com", "API.example.com", "Api.example.com, www.example.com", "'*.wild.example.com'", "WWW.Example.com")
		c.api.Put(fakekube.ServiceEntries, entryIn(namespace, name, fmt.Sprintf("hosts: [%s], addresses: [%s], exportTo: [%s]", hosts, c.ip(), c.scope()))[4:])
	case 8:
		c.remove(fakekube.ServiceEntries, namespace+"/"+name)
	case 9:
		selector := c.pick("", "workloadSelector: {labels: {app: web}}, ")
		egress := c.pick("shop/*", "./*", "*/a.shop.svc.cluster.local", "data/*", "*/*.example.com")
		c.api.Put(fakekube.Sidecars, sidecarYAML(c.pick("default", "more"), c.pick("shop", "data", "istio-system"), selector+"egress: [{hosts: ['"+egress+"', 'tick/*']}]")[4:])
	case 10:
		c.remove(fakekube.Sidecars, c.pick("shop", "data", "istio-system")+"/"+c.pick("default", "more"))
	case 11:
		c.api.Put(fakekube.ConfigMaps, meshYAML("defaultServiceExportTo: ["+c.pick("'*'", "'.'")+"]"))
	case 12: // more hosts than a history has
		hosts := make([]string, 1500)
		for i := range hosts {
			hosts[i] = fmt.Sprintf("h%d.bulk.example.com", i)
		}
		if c.rand.IntN(3) == 0 {
			c.api.Put(fakekube.ServiceEntries, entryIn("tick", "bulk", "hosts: ["+strings.Join(hosts, ", ")+"], addresses: ["+c.ip()+"]")[4:])
		}
	case 13:
		switch c.rand.IntN(6) {
		case 0:
			c.api.EndWatches()
		case 2: // new changes may reach the versions of before
			c.api.Restore(c.rand.IntN(10), func() {
				for range c.rand.IntN(15) {
					c.api.Put(fakekube.ServiceEntries, entryIn("tick", "more", "hosts: [more.example.com], addresses: ["+c.ip()+"]")[4:])
				}
			})
		case 1: // objects disappear while the API server is away
			c.api.Leave()
			c.api.Forget(c.pick(fakekube.Services, fakekube.ServiceEntries, fakekube.Sidecars))
			c.api.Return()
		}
	}
}

// remove deletes an object, if there is one.
func (c *churn) remove(path, key string) {
	if c.api.Object(path, key) != nil {
		c.api.Remove(path, key)
	}
}

// disturb lets a client do something.
func (c *churn) disturb() {
	client := c.clients[c.rand.IntN(len(c.clients))]
	r := c.replicas[c.rand.IntN(len(c.replicas))]
	switch c.rand.IntN(12) {
	case 0:
		client.take(true)
	case 1, 2:
		c.reconnect(client, r, nil)
	case 3:
		client.misled = true
		nonsense := make([]byte, digest.DigestsSize)
		for i := range nonsense {
			nonsense[i] = byte(c.rand.Uint32())
		}
		c.reconnect(client, r, nonsense)
	case 4:
		client.tables, client.versions, client.revision = map[string]map[string]string{}, map[string]string{}, nil
		c.reconnect(client, r, nil)
	default:
		c.take(client)
	}
}

// take lets a client apply a push. It connects again if it cannot.
func (c *churn) take(client *churnClient) {
	if _, ok := client.take(false); !ok {
		c.reconnect(client, c.replicas[c.rand.IntN(len(c.replicas))], nil)
	}
}

func (c *churn) reconnect(client *churnClient, r running, digests []byte) {
	c.t.Helper()
	if client.end != nil {
		client.end()
	}
	client.connect(r, digests)
}

// replace stops a replica, and starts another one. Its clients notice later.
func (c *churn) replace(i int) {
	if c.replicas[i].Server != nil {
		c.replicas[i].stop()
	}
	cfg := onAPI(c.t, c.api)
	cfg.Debounce = 5 * time.Millisecond
	c.replicas[i] = start(c.t, cfg)
}

// settle changes what all clients see, and waits until each has what a client of its kind has that connects to
// a new server.
func (c *churn) settle() {
	c.t.Helper()
	c.ticks++
	c.api.Put(fakekube.ServiceEntries, entryIn("tick", "tick", fmt.Sprintf("hosts: [tick.example.com], addresses: [192.0.2.%d], exportTo: ['*']", c.ticks%250+1))[4:])
	cfg := onAPI(c.t, c.api)
	fresh := start(c.t, cfg)
	defer fresh.stop()
	want := map[churnKind]string{}
	for _, client := range c.clients {
		kind := churnKind{variantSotw, mergesNothing, client.kind.namespace, client.kind.app}
		if _, ok := want[kind]; !ok {
			one := &churnClient{t: c.t, kind: kind, tables: map[string]map[string]string{}}
			one.connect(fresh, nil)
			wait.Until(c.t, "a push of a new server", func() bool {
				taken, _ := one.take(false)
				return taken
			})
			want[kind] = one.all()
			one.end()
		}
		wait.Until(c.t, fmt.Sprintf("client %+v has what a new one has", client.kind), func() bool {
			c.take(client)
			return client.all() == want[kind]
		})
	}
	for i, client := range c.clients { // nothing more comes
		kind := churnKind{variantSotw, mergesNothing, client.kind.namespace, client.kind.app}
		if c.take(client); client.all() != want[kind] {
			c.t.Fatalf("client %d, %+v, has another table after it had the right one", i, client.kind)
		}
	}
	for _, r := range c.replicas {
		wait.Until(c.t, "the replica shows all of its clients up to date", func() bool {
			for a := range r.Agents("") {
				if !a.Current || a.State != push.StateCurrent || a.Digest != a.ServedDigest {
					return false
				}
			}
			return true
		})
	}
}

// shown fails the test if a replica says of a client that it was not sent what has changed: it is sent that at once, or when it has
// answered.
func (c *churn) shown() {
	for _, r := range c.replicas {
		for a := range r.Agents("") {
			if a.State == push.StateUnsent {
				c.t.Errorf("a client is behind, and is sent nothing: %+v", a)
			}
		}
	}
}

// TestChurn checks that clients of all kinds, which delay and reject pushes, lose their streams and move between
// replicas, have the table of a new client whenever the objects stop changing, byte for byte.
func TestChurn(t *testing.T) { // D12, D15, D30, D33, D35, D36, D37, D38
	t.Parallel()
	seed := cmp.Or(*churnSeed, uint64(time.Now().UnixNano()))
	t.Logf("-churn.seed=%d", seed)
	c := &churn{t: t, rand: rand.New(rand.NewPCG(seed, 0)), api: fakekube.Start(t), replicas: make([]running, 2)}
	for _, name := range []string{"serviceentries", "sidecars"} {
		c.api.Put(fakekube.Definitions, strings.ReplaceAll(entryDefinition, "serviceentries", name))
	}
	for i := range c.replicas {
		c.replace(i)
	}
	for _, variant := range []string{variantSotw, variantDelta} {
		for _, merge := range []string{mergesHosts, mergesHosts, mergesNothing} {
			for _, namespace := range []string{"shop", "data"} {
				client := &churnClient{t: t, kind: churnKind{variant, merge, namespace, c.pick("", "web")}, tables: map[string]map[string]string{}, versions: map[string]string{}}
				client.connect(c.replicas[0], nil)
				c.clients = append(c.clients, client)
			}
		}
	}
	for step := range *churnSteps {
		c.edit()
		for range c.rand.IntN(6) {
			c.disturb()
		}
		if c.rand.IntN(2) == 0 { // else the edits are of one step
			time.Sleep(time.Duration(c.rand.IntN(10)) * time.Millisecond) //nolint:forbidigo // so that steps of the replicas differ
		}
		if step%100 == 60 {
			c.replace(c.rand.IntN(len(c.replicas)))
		}
		if step%40 == 39 {
			c.settle()
		}
		if c.shown(); t.Failed() {
			t.Fatalf("at step %d", step)
		}
	}
	for _, r := range c.replicas {
		if n := r.metric(t, "replica_differences_total"); n != 0 {
			t.Logf("%v differences are counted: a new replica that lists after a removal has the revision of one that has not heard of it", n)
		}
	}
}
