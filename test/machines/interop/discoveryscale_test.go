package interop

import (
	"context"
	"net/http"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A plane is a control plane whose figures are measured.
type plane struct {
	name    string
	start   func() *daemon // returns when it is ready
	flags   func(*machine) []string
	pods    bool                            // its tables have the hosts of endpoints
	relists func(since time.Time, c client) // waits until it has read all objects again
}

// planes returns the control planes to compare. They read the same objects, one after the other.
func planes(t *testing.T, w *writer, p population) []plane {
	t.Helper()
	d, i := &discovery{cluster: w.c}, &istiod{cluster: w.c}
	return []plane{
		{
			"nametap-discovery",
			func() *daemon { d.start(); return d.process },
			(*machine).discoveryFlags, true,
			func(since time.Time, _ client) { d.awaitHeard(since) },
		},
		{
			"istiod",
			func() *daemon { i.start(); return i.process },
			func(m *machine) []string { return m.plain(i) }, false,
			func(_ time.Time, c client) { w.wantEdits(t, p, c) },
		},
	}
}

// wantEdits edits a Service and an endpoint, and waits until an agent answers with both.
func (w *writer) wantEdits(t *testing.T, p population, c client) {
	t.Helper()
	for _, change := range p.edits() {
		for i := range change.write {
			if err := change.write[i](t.Context(), w); err != nil {
				t.Fatal(err)
			}
			wait.Until(t, "an edit of "+change.what+" is seen", func() bool { return c.ask(change.host, "A") == change.want[i] })
		}
	}
}

// An edit changes an object and changes it back, which shows in the answers for a host.
type edit struct {
	what  string
	host  string
	write [2]write
	want  [2]string
}

// edits returns an edit of each kind.
func (p population) edits() []edit {
	service, headless := p.nth(false, 0), p.nth(true, 0)
	put := func(exportTo string) write {
		return func(ctx context.Context, w *writer) error { return w.put(ctx, p.service(service, exportTo)) }
	}
	putSlice := func(version int) write {
		return func(ctx context.Context, w *writer) error { return w.putSlice(ctx, p.slice(headless, version)) }
	}
	return []edit{
		{"a Service", p.host(service), [2]write{put(hidden), put("")}, [2]string{"NXDOMAIN", p.clusterIP(service)}},
		{"endpoints", p.host(headless), [2]write{putSlice(1), putSlice(0)}, [2]string{p.answer(headless, 1), p.answer(headless, 0)}},
	}
}

// D15: with 10,000 Services, nametap-discovery reads all objects again after a restart of the API
// server, and sends nothing, because nothing has changed. The log has the memory, the processor
// time and the times that this takes, and istiod's.
func TestDiscoveryScale(t *testing.T) {
	c := newCluster(t)
	c.write("mesh.yaml", meshConfig)
	p := population{*services}
	w := c.populate(p)
	for _, plane := range planes(t, w, p) {
		t.Run(plane.name, func(t *testing.T) {
			begun := time.Now()
			d := plane.start()
			t.Logf("ready after %v, which took %v of a processor: %v", time.Since(begun).Round(time.Millisecond), d.processor(), d.memory())
			t.Logf("steady, without an agent: %v", d.settled())
			m := c.machine(onlyIPv4)
			begun = time.Now()
			a := m.agent(pod{"scale", p.namespace(0)}, plane.flags(m)...)
			t.Logf("an agent has its table after %v", time.Since(begun).Round(time.Millisecond))
			want := w.table(plane.pods)
			wantPopulation(t, a, want)
			steady := d.settled()
			t.Logf("steady, with an agent that has %d hosts: %v; processor time %v", len(want), steady, d.processor())

			conn := m.connect(dnsAddr)
			defer conn.Close()
			used, pushes, peak := d.processor(), a.pushes(), 0
			took := restartAPIServer(w, d, func(since time.Time) {
				plane.relists(since, conn)
				peak = d.memory().peak
			})
			t.Logf("reads all objects again: %v after the API server is ready, which took %v of a processor; peak %.1f MiB, %.2f times the steady %.1f",
				took.Round(time.Millisecond), d.processor()-used, float64(peak)/1024, float64(peak)/float64(steady.resident), float64(steady.resident)/1024)
			t.Logf("steady: %v", d.settled())
			if n := a.pushes() - pushes; plane.name != "istiod" && n > 0 {
				t.Errorf("the agent was sent %d pushes, although nothing has changed", n)
			}
			wantPopulation(t, a, want)
			w.wantEdits(t, p, conn)
			a.end(terminate)
			d.end(syscall.SIGKILL)
		})
	}
}

// restartAPIServer kills the API server and starts it again, so that its watch cache has no old versions
// and clients must list. It returns how long after the API server was ready relisted returned.
func restartAPIServer(w *writer, d *daemon, relisted func(since time.Time)) time.Duration {
	w.c.tb.Helper()
	w.must(request{method: http.MethodPost, path: "/api/v1/namespaces/default/configmaps", object: &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{GenerateName: "version-"},
	}})
	d.resetPeak()
	w.c.apiserver.end(syscall.SIGKILL)
	since := time.Now()
	w.c.startAPIServer()
	ready := time.Now()
	relisted(since)
	return time.Since(ready)
}
