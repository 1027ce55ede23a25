package interop

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/internal/testkit/wait"
)

var (
	creationRate = flag.Int("interop.creations", 200, "pods created a second by TestPodCreations")
	creationTime = flag.Duration("interop.creating", 10*time.Second, "how long TestPodCreations creates pods in each step")
)

// creations are the pods that were created in a time.
type creations struct {
	mu       sync.Mutex
	times    []time.Duration
	failures []string
	plain    int // pods without the agent
}

// note notes the result of one creation.
func (n *creations) note(took time.Duration, pod *corev1.Pod, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		n.failures = append(n.failures, err.Error())
		return
	}
	n.times = append(n.times, took)
	if pod.Annotations[injectStatus] == "" {
		n.plain++
	}
}

// quantile returns the time in which that part of the pods was created.
func (n *creations) quantile(q float64) time.Duration {
	slices.Sort(n.times)
	if len(n.times) == 0 {
		return 0
	}
	return n.times[min(int(q*float64(len(n.times))), len(n.times)-1)].Round(10 * time.Microsecond)
}

// String returns the figures.
func (n *creations) String() string {
	kinds := map[string]int{}
	for _, f := range n.failures {
		kinds[printable(f)]++
	}
	return fmt.Sprintf("%d pods, p50 %v, p99 %v, most %v, %d failed %v", len(n.times), n.quantile(.5), n.quantile(.99), n.quantile(1), len(n.failures), kinds)
}

// printable returns the end of an error, in which the API server's answer is binary.
func printable(failure string) string {
	words := strings.FieldsFunc(failure, func(r rune) bool { return r < ' ' || r > '~' })
	slices.SortFunc(words, func(a, b string) int { return len(b) - len(a) })
	return words[0]
}

// newPod returns a pod with a name of its own.
func newPod(namespace string, i int64) *corev1.Pod {
	no := false
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d", i), Namespace: namespace},
		Spec: corev1.PodSpec{
			AutomountServiceAccountToken: &no,
			Containers:                   []corev1.Container{{Name: "app", Image: "app"}},
		},
	}
}

// createPods creates pods at the rate while step runs, and at least for creationTime.
func (w *writer) createPods(namespace string, number *atomic.Int64, step func()) *creations {
	n := new(creations)
	ctx, cancel := context.WithTimeout(w.c.tb.Context(), *creationTime)
	defer cancel()
	stepped, due := make(chan struct{}), make(chan time.Time, 1000)
	var group sync.WaitGroup
	group.Go(func() {
		defer close(due)
		for next := time.Now(); ; next = next.Add(time.Second / time.Duration(*creationRate)) {
			<-time.After(time.Until(next))
			due <- next
			select {
			case <-stepped:
				if ctx.Err() != nil {
					return
				}
			default:
			}
		}
	})
	for range writers {
		group.Go(func() {
			for begun := range due { // a creation that has to wait for others counts from when it was due
				pod := new(corev1.Pod)
				err := w.send(w.c.tb.Context(), request{http.MethodPost, "/api/v1/namespaces/" + namespace + "/pods", newPod(namespace, number.Add(1)), pod})
				n.note(time.Since(begun), pod, err)
			}
		})
	}
	step()
	close(stepped)
	group.Wait()
	return n
}

// stopReplica stops a replica by a signal, and removes it from the endpoints after a second, as kubelet
// and Kubernetes' controllers do when a pod is deleted or its process has ended.
func (c *injectedCluster) stopReplica(signal syscall.Signal, remaining ...string) {
	c.tb.Helper()
	r := c.replicas[0]
	c.replicas = c.replicas[1:]
	r.signal(signal)
	time.Sleep(time.Second) //nolint:forbidigo // as long as Kubernetes takes
	c.endpoints(remaining...)
	wait.For(c.tb, "the replica ends", r.ended)
}

// TestPodCreations creates pods at a rate without and with the webhook, while the certificate is renewed, and while replicas are replaced and killed.
func TestPodCreations(t *testing.T) { // I7
	c := newInjectedCluster(t)
	c.managers.end(terminate)
	w := c.writer(apiAddr)
	number := new(atomic.Int64)
	count := func(what string, injected bool, step func()) *creations {
		t.Helper()
		server := c.apiserver.processor()
		n := w.createPods("enabled", number, step)
		server = (c.apiserver.processor() - server) / time.Duration(max(1, len(n.times)))
		t.Logf("%s: %v; processor time of the API server for one: %v", what, n, server.Round(10*time.Microsecond))
		if injected && n.plain > 0 {
			t.Errorf("%s: %d pods without the agent", what, n.plain)
		}
		return n
	}
	none := func(what string, step func()) {
		t.Helper()
		if n := count(what, true, step); len(n.failures) > 0 {
			t.Errorf("%s: %d creations have failed: %v", what, len(n.failures), n.failures[0])
		}
	}
	pause := func() {}
	count("warm", false, pause)
	count("without injection", false, pause)
	due := madeBefore(t, 80*24*time.Hour)
	c.applySecret(due)
	c.startWebhook("160", "170")
	before := c.replicas[0].processor() + c.replicas[1].processor()
	n := count("webhook, two replicas", true, pause)
	used := c.replicas[0].processor() + c.replicas[1].processor() - before
	t.Logf("processor time of the webhook for one: %v", (used / time.Duration(max(1, len(n.times)))).Round(10*time.Microsecond))
	for _, r := range c.replicas {
		t.Logf("replica %s: %v, seconds %v", r.ports[0], r.memory(), histogram(c.metrics(r)))
	}
	none("the certificate is renewed", func() {
		c.applySecret(due) // of the same authority
		wait.Until(t, "it is renewed", func() bool { return !bytes.Equal(c.secret().Data["tls.crt"], due["tls.crt"]) })
	})
	none("a second authority joins", func() {
		data, more := c.secret().Data, madeBefore(t, time.Hour)
		for _, key := range []string{"ca.crt", "ca.key"} {
			data[key] = slices.Concat(data[key], more[key])
		}
		c.applySecret(data)
		wait.Until(t, "it has joined", func() bool { return strings.Count(c.bundles()[1], "BEGIN") == 2 })
	})
	none("replicas are replaced", func() {
		c.startReplica("180")
		c.endpoints("160", "170", "180")
		c.stopReplica(syscall.SIGTERM, "170", "180")
		c.startReplica("190")
		c.endpoints("170", "180", "190")
		c.stopReplica(syscall.SIGTERM, "180", "190")
	})
	killed := count("one of two replicas is killed, and removed from the endpoints a second later", true, func() { c.stopReplica(syscall.SIGKILL, "190") })
	none("after that", pause)
	t.Logf("%d of %d creations were refused while one of two replicas was killed", len(killed.failures), len(killed.failures)+len(killed.times))
}

// madeBefore returns the data of a Secret with a certificate and an authority of an age.
func madeBefore(t *testing.T, age time.Duration) map[string][]byte {
	t.Helper()
	made, err := pki.NewPolicy([]string{discoveryName}).Renewed(nil, time.Now().Add(-age))
	if err != nil {
		t.Fatal(err)
	}
	data, err := made.Data()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// applySecret puts data into the Secret with the certificate.
func (c *injectedCluster) applySecret(data map[string][]byte) {
	c.tb.Helper()
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Secret",
		"metadata": map[string]any{"name": "nametap-discovery-tls", "namespace": discoverySystem}, "data": data,
	})
	if err != nil {
		c.tb.Fatal(err)
	}
	c.apply(string(text))
}

// histogram returns the counts of the metric of the webhook's seconds, by their upper bounds.
func histogram(metrics string) []string {
	var counts []string
	for line := range strings.Lines(metrics) {
		if rest, ok := strings.CutPrefix(line, "nametap_discovery_inject_seconds_"); ok {
			counts = append(counts, strings.TrimSpace(rest))
		}
	}
	return counts
}
