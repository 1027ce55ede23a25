package discovery

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// startWriting starts a replica that shares a Lease with others, and returns when it is ready.
func startWriting(t *testing.T, a *fakekube.API, name string) running {
	t.Helper()
	cfg := onAPI(t, a)
	cfg.Lease, cfg.Identity = source.Name{Namespace: "nametap-system", Name: "nametap-discovery"}, name
	return start(t, cfg)
}

// vips returns the automatic VIPs that a client of the server has.
func (r running) vips(t *testing.T) map[string]string {
	t.Helper()
	return ipsOf(t, openDelta(t, r, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil).next().tables[""])
}

// statusOf returns the VIPs in the status of a ServiceEntry of namespace shop.
func statusOf(t *testing.T, a *fakekube.API, name string) string {
	t.Helper()
	list, _, err := unstructured.NestedSlice(a.Object(fakekube.ServiceEntries, "shop/"+name).Object, "status", "addresses")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, item := range list {
		all = append(all, fmt.Sprint(item.(map[string]any)["value"]))
	}
	return strings.Join(all, " ")
}

func putEntry(a *fakekube.API, name, host string) {
	a.Put(fakekube.ServiceEntries, entryYAML(name, "shop", "hosts: ["+host+"]", "resolution: DNS"))
}

// TestWriter checks that one of two replicas writes the VIPs of hosts to the status of their
// ServiceEntries, that both serve the same ones although the hosts prefer the same VIP and came in
// another order, and that the other one takes over when the first ends.
func TestWriter(t *testing.T) { // D39
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	names := colliding(3)
	putEntry(a, "z", names[2])
	first := startWriting(t, a, "first")
	wait.Until(t, "the first VIP is written", func() bool { return statusOf(t, a, "z") != "" })
	putEntry(a, "a", names[0])
	wait.Until(t, "the second VIP is written", func() bool { return statusOf(t, a, "a") != "" })
	second := startWriting(t, a, "second")
	want := map[string]string{names[2]: statusOf(t, a, "z"), names[0]: statusOf(t, a, "a")}
	if want[names[0]] == want[names[2]] || preferredVIP(names[2]) != strings.Fields(want[names[2]])[0] {
		t.Errorf("written: %v", want)
	}
	same := func() bool {
		return fmt.Sprint(first.vips(t)) == fmt.Sprint(want) && fmt.Sprint(second.vips(t)) == fmt.Sprint(want)
	}
	wait.Until(t, "both replicas serve what is written", same)

	first.stop()
	putEntry(a, "m", names[1])
	wait.Until(t, "the other replica writes", func() bool { return statusOf(t, a, "m") != "" })
	want[names[1]] = statusOf(t, a, "m")
	first = second
	wait.Until(t, "the replica serves what is written", same)

	// VIPs that were written stay only as long as they are needed.
	a.Put(fakekube.ServiceEntries, entryYAML("m", "shop", "hosts: ["+names[1]+"]", "resolution: DNS", "addresses: [192.0.2.1]")+
		"status: {addresses: [{host: "+names[1]+", value: 240.240.9.9}]}\n")
	wait.Until(t, "needless VIPs are removed", func() bool { return statusOf(t, a, "m") == "" })
}
