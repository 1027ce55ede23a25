package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An agent is the agent in a pod, in the form in which `fleet --output json` prints it and the page reads it.
type agent struct {
	Namespace string    `json:"namespace"`
	Workload  string    `json:"workload"` // what has made the pod, such as a Deployment
	Name      string    `json:"name"`     // of the pod
	Node      string    `json:"node"`
	State     state     `json:"state"`
	Problems  []problem `json:"problems,omitempty"`
	Version   string    `json:"version,omitempty"`
	Connected bool      `json:"connected"` // to the control plane
	Table     *table    `json:"table,omitempty"`
	// Queries and Failures are counted since the start of the agent, and Recent while the fleet was read. A failure
	// has another response code than NOERROR and NXDOMAIN.
	counts
	Recent *recent `json:"recent,omitempty"`

	path    string // of the agent's status port, at the API server
	gone    bool   // whether the pod was deleted
	counted time.Time
}

// A state is what is known of an agent.
type state string

// The states. An agent is ok only if it has just said so itself.
const (
	ok       state = "ok"
	starting state = "starting" // its container is being made
	warning  state = "warning"
	broken   state = "problem"
	unknown  state = "unknown" // it could not be asked
)

// A problem is what is wrong, as the agent calls it, or why nothing is known.
type problem struct {
	Code     string `json:"code"`
	Severity state  `json:"severity"`
	What     string `json:"what"`
}

// A table describes the table of an agent.
type table struct {
	Hosts  int     `json:"hosts"`
	Age    float64 `json:"ageSeconds"`
	Digest string  `json:"digest,omitempty"` // differs between different tables; "" if the agent has none
	Stale  bool    `json:"stale"`
}

// counts are numbers of queries.
type counts struct {
	Queries  int64 `json:"queries"`
	Failures int64 `json:"failures"`
}

// recent counts the queries while the fleet was read. Curve has the same by part of this time, in their order.
type recent struct {
	Seconds float64 `json:"seconds"`
	counts
	Curve []counts `json:"curve"`
}

const (
	// annotation is the annotation of injected pods. Pods whose agent was added by hand have the container only.
	annotation     = "nametap.dev/status"
	agentContainer = "nametap"
	portName       = "status"
	// replyTime is how long an agent may take to reply.
	replyTime = 5 * time.Second
)

// newAgent returns the agent in a container of a pod, nil if the pod has none. A ReplicaSet is called as its Deployment, whose
// name it has, with a hash.
func newAgent(p *corev1.Pod, container string) *agent {
	a := &agent{Namespace: p.Namespace, Workload: p.Name, Name: p.Name, Node: p.Spec.NodeName, State: starting}
	if owner := metav1.GetControllerOf(p); owner != nil {
		a.Workload = strings.TrimSuffix(owner.Name, "-"+p.Labels["pod-template-hash"])
	}
	containers := slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
	at := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == container })
	if p.DeletionTimestamp != nil || at < 0 && p.Annotations[annotation] == "" {
		return nil
	}
	if at < 0 {
		a.fail(broken, "no_container", "the pod has the annotation "+annotation+", and no container "+container)
		return a
	}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if s.Name != container {
			continue
		}
		switch waits, ended := s.State.Waiting, s.State.Terminated; {
		case ended != nil:
			a.fail(broken, "container_ended", "the container has ended: "+ended.Reason+" "+ended.Message)
		case waits != nil && waits.Reason != "ContainerCreating" && waits.Reason != "PodInitializing":
			a.fail(broken, "container_waits", "the container waits: "+waits.Reason+" "+waits.Message)
		case s.State.Running != nil:
			a.fail(unknown, "no_port", "the container has no port with the name "+portName)
			for _, port := range containers[at].Ports {
				if port.Name == portName {
					a.path = fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:%d/proxy", a.Namespace, a.Name, port.ContainerPort)
				}
			}
		}
	}
	return a
}

// fail sets the state, and the reason.
func (a *agent) fail(s state, code, what string) {
	a.State, a.Problems = s, []problem{{code, s, what}}
}

// read reads the state of the agent.
func (a *agent) read(ctx context.Context, c *cluster) {
	if a.path == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, replyTime)
	defer cancel()
	code, body, err := c.get(ctx, a.path+"/metrics", nil, maxShown)
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, malformed := parser.TextToMetricFamilies(bytes.NewReader(body))
	switch {
	case err != nil && code == http.StatusNotFound:
		a.gone = true
	case errors.Is(err, context.DeadlineExceeded):
		a.fail(unknown, "no_reply", "no reply in "+replyTime.String())
		a.path = "" // it keeps others waiting, so it is asked once only
	case err != nil:
		a.fail(unknown, "unreachable", err.Error())
	case code != http.StatusOK || malformed != nil || families["nametap_problem"] == nil:
		a.fail(unknown, "no_metrics", fmt.Sprintf("the port %s shows no metrics of an agent (HTTP %d)", portName, code))
	default:
		a.set(families)
		if len(a.Problems) > 0 {
			a.describe(ctx, c)
		}
	}
}

// set sets the state from metrics.
func (a *agent) set(families map[string]*dto.MetricFamily) {
	before := a.counts
	a.State, a.Problems, a.counts = ok, nil, counts{}
	each(families, "nametap_problem", func(labels map[string]string, count float64) {
		if code := labels["code"]; count > 0 {
			a.State = broken
			a.Problems = append(a.Problems, problem{code, broken, strings.ReplaceAll(code, "_", " ")})
		}
	})
	each(families, "nametap_build_info", func(labels map[string]string, _ float64) { a.Version = labels["version"] })
	each(families, "nametap_dns_queries_total", func(labels map[string]string, count float64) {
		a.Queries += int64(count)
		if rcode := labels["rcode"]; rcode != "NOERROR" && rcode != "NXDOMAIN" {
			a.Failures += int64(count)
		}
	})
	number := func(name string) (n float64) {
		each(families, name, func(_ map[string]string, value float64) { n = value })
		return n
	}
	a.Connected, a.Table = number("nametap_xds_connected") > 0, nil
	now := time.Now()
	if pushed := number("nametap_xds_table_timestamp_seconds"); pushed > 0 {
		a.Table = &table{
			Hosts: int(number("nametap_table_hosts")), Stale: number("nametap_xds_table_stale") > 0,
			Age: math.Max(0, math.Round(float64(now.UnixMilli())/1e3-pushed)),
		}
		if digest := number("nametap_xds_table_digest"); digest > 0 {
			a.Table.Digest = fmt.Sprintf("%012x", int64(digest))
		}
	}
	if !a.counted.IsZero() {
		a.add(now.Sub(a.counted), before)
	}
	a.counted = now
}

// add adds to Recent what was counted in the time past, before which the counts were as given.
func (a *agent) add(past time.Duration, before counts) {
	part := counts{a.Queries - before.Queries, a.Failures - before.Failures}
	if part.Queries < 0 || part.Failures < 0 { // the agent was restarted
		part = a.counts
	}
	if a.Recent == nil {
		a.Recent = &recent{}
	}
	a.Recent.Seconds += past.Seconds()
	a.Recent.Queries += part.Queries
	a.Recent.Failures += part.Failures
	a.Recent.Curve = append(a.Recent.Curve, part)
}

// each calls f for each series of a metric.
func each(families map[string]*dto.MetricFamily, name string, f func(labels map[string]string, value float64)) {
	for _, m := range families[name].GetMetric() {
		labels := map[string]string{}
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		f(labels, m.GetCounter().GetValue()+m.GetGauge().GetValue()+m.GetUntyped().GetValue())
	}
}

// describe replaces the problems by those that the readiness probe names, with their severity and in words. If it names
// none, they stay.
func (a *agent) describe(ctx context.Context, c *cluster) {
	_, body, _ := c.get(ctx, a.path+"/healthz/ready", nil, maxShown)
	var named []problem
	worst := warning
	for line := range strings.Lines(string(body)) {
		severity, rest, _ := strings.Cut(strings.TrimSpace(line), ": ")
		code, what, found := strings.Cut(rest, ": ")
		if s := state(severity); found && (s == warning || s == broken) {
			named = append(named, problem{code, s, what})
			if s == broken {
				worst = broken
			}
		}
	}
	if len(named) > 0 {
		a.State, a.Problems = worst, named
	}
}
