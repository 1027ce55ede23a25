package interop

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

var (
	creationRate = flag.Int("interop.creations", 50, "pods created a second by TestWebhook/creations")
	creationTime = flag.Duration("interop.creating", 3*time.Second, "how long TestWebhook/creations creates pods in each step")
)

// TestWebhook has a real API server ask nametap-discovery about pods. See the subtests. The last ones end replicas.
func TestWebhook(t *testing.T) { // I3, I7, I9
	c := newInjectedCluster(t)
	c.startWebhook("160", "170")
	t.Run("creations", func(t *testing.T) { c.testCreations(t) })
	t.Run("away", func(t *testing.T) { c.in(t).testAway(t) })
}

// testCreations creates pods at a rate, while the certificate is renewed, and replicas are replaced: no creation fails, and no pod is without the agent. It logs the times, also without injection.
func (c *injectedCluster) testCreations(t *testing.T) {
	c.awaitSettings(injectSettings, func(pod *corev1.Pod) bool { return strings.HasPrefix(pod.Annotations[injectStatus], `{"mode":"rules"`) })
	c.namespace("created", "nametap.dev/inject: enabled", "")
	c.ControllerManager.End(syscall.SIGTERM) // it would make a few requests for each pod
	var number atomic.Int64
	count := func(what, namespace string, step func()) {
		t.Helper()
		var mu sync.Mutex
		var times []time.Duration
		var failures []string
		var group sync.WaitGroup
		stepped, begun := make(chan struct{}), time.Now()
		const writers = 8
		for range writers {
			group.Go(func() {
				for next := begun; ; next = next.Add(writers * time.Second / time.Duration(*creationRate)) {
					<-time.After(time.Until(next))
					if next.Sub(begun) > *creationTime {
						select {
						case <-stepped:
							return
						default:
						}
					}
					sent := time.Now()
					pod, err := c.create(namespace, strings.Replace(plainPod, "name: app", fmt.Sprintf("name: pod-%d", number.Add(1)), 1), "")
					mu.Lock()
					times = append(times, time.Since(sent))
					if err != nil {
						failures = append(failures, err.Error())
					} else if (pod.Annotations[injectStatus] != "") != (namespace == "created") {
						failures = append(failures, fmt.Sprintf("the annotations are %v", pod.Annotations))
					}
					mu.Unlock()
				}
			})
		}
		step()
		close(stepped)
		group.Wait()
		slices.Sort(times)
		t.Logf("%s: %d pods, p50 %v, p99 %v, %d failed", what, len(times), times[len(times)/2], times[len(times)*99/100], len(failures))
		if len(failures) > 0 {
			t.Errorf("%s: %d creations have failed: %v", what, len(failures), failures[0])
		}
	}
	pause := func() {}
	count("without injection", "none", pause)
	count("webhook, two replicas", "created", pause)
	count("the certificate is renewed", "created", func() {
		certify(c.Cluster)
		for _, r := range c.replicas {
			wait.Until(t, "it is used", func() bool { return r.Logged("TLS files have changed") >= 2 }) // also at the start
		}
	})
	// A pod that is deleted is removed from the endpoints after a second.
	stop := func(remaining ...string) {
		r := c.replicas[0]
		c.replicas = c.replicas[1:]
		r.Signal(syscall.SIGTERM)
		time.Sleep(time.Second) //nolint:forbidigo // as long as Kubernetes takes
		c.endpoints(remaining...)
		wait.For(t, "the replica ends", r.Ended)
	}
	count("replicas are replaced", "created", func() {
		c.replicas = append(c.replicas, startReplica(c.Cluster, c.args, "180"))
		c.endpoints("160", "170", "180")
		stop("170", "180")
		stop("180")
	})
}

// testAway checks that wrong settings are not used, and which pods can be created while no replica runs.
func (c *injectedCluster) testAway(t *testing.T) {
	r := c.replicas[0]
	image := func(want string) func(*corev1.Pod) bool {
		return func(pod *corev1.Pod) bool { return pod.Spec.InitContainers[0].Image == want }
	}
	const failing = "nametap_discovery_inject_settings_error"
	c.awaitSettings("image: other:1\n", image("other:1"))
	c.Write("inject.yaml", "imag: wrong:1\n")
	if pod, err := c.dryRun("enabled", plainPod); err != nil || !image("other:1")(pod) || c.Metric(r.status, failing) != 1 {
		t.Error("the previous settings do not stay, or the metric does not say so")
	}
	wait.Until(t, "the error is logged", func() bool { return r.Logged("level=ERROR", "inject.yaml", "imag") == 1 })
	c.awaitSettings("image: third:1\n", image("third:1"))
	if c.Metric(r.status, failing) != 0 {
		t.Error("the metric does not show the end of the error")
	}

	r.End(syscall.SIGKILL)
	const windows = "{matchExpressions: [{key: a, operator: Exists}, {key: kubernetes.io/os, operator: In, values: [windows]}]}"
	affinity := func(terms string) string {
		return ", affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [" + terms + "]}}}"
	}
	for _, pod := range []struct {
		namespace, labels, spec string
		refused                 bool
	}{
		{"none", "{}", "", false}, {"disabled", "{}", "", false}, {"enabled", `{nametap.dev/inject: "false"}`, "", false}, {"enabled", "{}", ", hostNetwork: true", false},
		{"kube-system", `{nametap.dev/inject: "true"}`, "", false}, {discoverySystem, `{app: nametap-discovery}`, "", false},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: windows}", false}, {"enabled", "{}", affinity(windows), false},
		{"enabled", "{}", "", true}, {"none", `{nametap.dev/inject: "true"}`, "", true},
		{"enabled", "{}", ", nodeSelector: {kubernetes.io/os: linux}", true}, {"enabled", "{}", affinity(windows + ", {matchExpressions: [{key: a, operator: Exists}]}"), true},
	} {
		_, err := c.dryRun(pod.namespace, "metadata: {name: app, labels: "+pod.labels+"}\nspec: {automountServiceAccountToken: false"+pod.spec+", containers: ["+restrictedContainer+"]}\n")
		if (err != nil) != pod.refused || err != nil && (!strings.Contains(err.Error(), `.inject.nametap.dev"`) || !strings.Contains(err.Error(), "nametap-discovery.nametap-system.svc:15017/inject/")) {
			t.Errorf("%+v: %v", pod, err)
		}
	}
}
