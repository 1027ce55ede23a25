package discovery

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A writingReplica is one of several servers that share an API server and a Lease.
type writingReplica struct {
	running
	log *testlog.Buffer
}

// startWriting starts a replica, and returns when it is ready.
func startWriting(t *testing.T, a *fakekube.API, name string) writingReplica {
	t.Helper()
	log := testlog.New(t)
	cfg := onAPI(t, a)
	cfg.Lease, cfg.Identity, cfg.Logger = source.Name{Namespace: "nametap-system", Name: "nametap-discovery"}, name, log.Logger()
	return writingReplica{start(t, cfg), log}
}

// vips returns the automatic VIPs that a client of the replica has.
func (r writingReplica) vips(t *testing.T) map[string]string {
	t.Helper()
	return ipsOf(t, openDelta(t, r.running, node(t, "shop", "DNS_AUTO_ALLOCATE", "true"), nil).next().tables[""])
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
	if second.writer.Holds() || !first.writer.Holds() {
		t.Error("the second replica holds the Lease")
	}

	first.stop()
	putEntry(a, "m", names[1])
	wait.Until(t, "the other replica writes", func() bool { return statusOf(t, a, "m") != "" })
	want[names[1]] = statusOf(t, a, "m")
	first = startWriting(t, a, "first, again")
	wait.Until(t, "both replicas serve what is written", same)
	if a.Writes()["PATCH "+fakekube.ServiceEntries+" OK"] != 3 {
		t.Errorf("writes: %v", a.Writes())
	}

	// VIPs that were written stay only as long as they are needed.
	a.Put(fakekube.ServiceEntries, entryYAML("m", "shop", "hosts: ["+names[1]+"]", "resolution: DNS", "addresses: [192.0.2.1]")+
		"status: {addresses: [{host: "+names[1]+", value: 240.240.9.9}]}\n")
	wait.Until(t, "needless VIPs are removed", func() bool { return statusOf(t, a, "m") == "" })
}

// TestStatusIsRepaired checks that a ServiceEntry stays in use, and gets its VIPs again, when its status has
// something else.
func TestStatusIsRepaired(t *testing.T) { // D39
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	putEntry(a, "e", "a.example.com")
	r := startWriting(t, a, "only")
	wait.Until(t, "the VIPs are written", func() bool { return statusOf(t, a, "e") != "" })
	want := statusOf(t, a, "e")
	good := strings.Fields(want)
	for _, addresses := range []string{
		"[{host: a.example.com, value: nonsense}]", "[{host: a.example.com, value: 'fe80::1%eth0'}]", "nonsense", "[1]",
		"[{host: a.example.com, value: '" + good[0] + "'}, {host: a.example.com, value: '" + good[1] + "'}, {value: ''}]",
	} {
		a.Put(fakekube.ServiceEntries, entryYAML("e", "shop", "hosts: [a.example.com]", "resolution: DNS")+"status: {addresses: "+addresses+"}\n")
		repaired := func() bool {
			list, found, err := unstructured.NestedSlice(a.Object(fakekube.ServiceEntries, "shop/e").Object, "status", "addresses")
			return found && err == nil && len(list) == 2 && statusOf(t, a, "e") == want
		}
		wait.Until(t, "the status "+addresses+" is repaired", repaired)
		if got := r.vips(t)["a.example.com"]; got == "" {
			t.Errorf("with the status %s, the host has no VIP", addresses)
		}
		if errs := r.Errors(); len(errs) > 0 {
			t.Errorf("with the status %s: %v", addresses, errs)
		}
	}
}

// TestLeaseForbidden checks that the log says once why a Lease cannot be used, and when that ends.
func TestLeaseForbidden(t *testing.T) { // D39
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	putEntry(a, "e", "a.example.com")
	lease := "/apis/coordination.k8s.io/v1/namespaces/nametap-system/leases/nametap-discovery"
	a.Refuse(lease, http.StatusForbidden)
	r := startWriting(t, a, "only")
	wait.Until(t, "the log says why", func() bool {
		return r.log.Count("level=ERROR", "cannot use the Lease", "nametap-system/nametap-discovery", "update leases") == 1
	})
	a.Refuse(lease, 0)
	wait.Until(t, "the VIPs are written", func() bool { return statusOf(t, a, "e") != "" })
	wait.Until(t, "the log of the end of the failure", func() bool { return r.log.Count("the Lease can be used again") == 1 })
	if n := r.log.Count("cannot use the Lease"); n != 1 {
		t.Errorf("%d lines about the failure, want 1", n)
	}
}

// TestWriteForbidden checks that VIPs are written in other namespaces while a policy forbids the writes in one, and that the
// log names an object of this one.
func TestWriteForbidden(t *testing.T) { // D39
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	for _, name := range []string{"a", "b"} {
		a.Put(fakekube.ServiceEntries, entryYAML(name, "data", "hosts: ["+name+".data.example.com]", "resolution: DNS"))
	}
	status := "/apis/networking.istio.io/v1/namespaces/data/serviceentries/a/status"
	a.Refuse(status, http.StatusForbidden)
	putEntry(a, "e", "a.example.com")
	r := startWriting(t, a, "only")
	wait.Until(t, "the VIPs are written", func() bool { return statusOf(t, a, "e") != "" })
	wait.Until(t, "the log names the object", func() bool {
		return r.log.Count("automatic VIPs are not written", "ServiceEntry data/a", status) == 1
	})
}

// TestWriterBesideIstiod checks that nothing is written while istiod holds the lock of its own
// controller, that the log says so, and that the VIPs are written when istiod has left.
func TestWriterBesideIstiod(t *testing.T) { // D39
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	lock := func(renewed time.Time) {
		a.Put(fakekube.ConfigMaps, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: istio-ip-autoallocate\n  namespace: istio-system\n"+
			"  annotations: {control-plane.alpha.kubernetes.io/leader: '{\"holderIdentity\":\"istiod-1\",\"leaseDurationSeconds\":30,\"renewTime\":%q}'}\n", renewed.UTC().Format(time.RFC3339)))
	}
	lock(time.Now())
	putEntry(a, "e", "a.example.com")
	r := startWriting(t, a, "only")
	wait.Until(t, "the log that istiod writes", func() bool { return r.log.Count("automatic VIPs are not written", "istiod-1") == 1 })
	// istiod renews its lock, and the clock of this machine is ahead.
	a.SetClock(-2 * time.Hour)
	lock(time.Now().Add(-2 * time.Hour))
	wait.Until(t, "the log that the clocks differ", func() bool { return r.log.Count("automatic VIPs are not written", "istiod-1", "is 2h0m0s ahead") == 1 })
	if statusOf(t, a, "e") != "" {
		t.Error("istiod and the replica write VIPs")
	}
	a.SetClock(0)
	lock(time.Now().Add(-5 * time.Minute))
	putEntry(a, "f", "b.example.com")
	wait.Until(t, "both are written", func() bool { return statusOf(t, a, "e") != "" && statusOf(t, a, "f") != "" })
}

// TestHolderDies checks that new VIPs are written when the Lease of a holder that has died ends, which is 15 s
// after it was renewed, and that hosts have VIPs meanwhile. The Lease of the test is shorter.
func TestHolderDies(t *testing.T) { // D40
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, entryDefinition)
	const lasts = 3 * time.Second
	a.Put(fakekube.Leases, fmt.Sprintf("apiVersion: coordination.k8s.io/v1\nkind: Lease\nmetadata: {name: nametap-discovery, namespace: nametap-system}\n"+
		"spec: {holderIdentity: dead, leaseDurationSeconds: %d, leaseTransitions: 0, acquireTime: %[2]q, renewTime: %[2]q}\n",
		int(lasts/time.Second), time.Now().UTC().Format("2006-01-02T15:04:05.000000Z")))
	putEntry(a, "e", "a.example.com")
	begun := time.Now()
	r := startWriting(t, a, "heir")
	before := r.vips(t)["a.example.com"]
	if before == "" {
		t.Error("without a holder, the host has no VIP")
	}
	wait.Until(t, "the VIP is written", func() bool { return statusOf(t, a, "e") != "" })
	if took := time.Since(begun); took < lasts {
		t.Errorf("the VIP is written after %v, while the Lease of the other holder lasts", took)
	}
	own, _, err := unstructured.NestedFieldNoCopy(a.Object(fakekube.Leases, "nametap-system/nametap-discovery").Object, "spec", "leaseDurationSeconds")
	if err != nil || fmt.Sprint(own) != "15" {
		t.Errorf("the Lease of the new holder lasts %v s, want 15: %v", own, err)
	}
	if got := statusOf(t, a, "e"); got != before {
		t.Errorf("%s is written, the host had %s", got, before)
	}
}
