package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A fakeCluster is an API server with pods, of which some have agents.
type fakeCluster struct {
	pods []fakePod

	flying  atomic.Int32
	barrier sync.WaitGroup // the first requests wait for each other, so that they are in flight together
	waiting atomic.Int32
	asked   sync.Map // the paths of pods that were requested
}

// A fakePod is a pod. Without a state it runs and has an agent whose metrics and readiness are as follow.
type fakePod struct {
	namespace, name, owner, hash string
	labels                       string // such as app=cart
	state                        string // of the container nametap; "none" without one
	port                         string // of its container port; "status" if it is empty
	ready                        string // the response of /healthz/ready
	codes                        []string
	answered                     map[string]int // queries by rcode
	refused                      string         // the error of the API server when it connects to the pod
	page                         string         // what the pod has in place of metrics, or after them if it begins with a blank line
}

// scenarios returns the clusters of the tests, by the value of $CLUSTER.
func scenarios() map[string]*fakeCluster {
	var many fakeCluster
	for i := range 2000 {
		many.pods = append(many.pods, fakePod{namespace: fmt.Sprintf("ns-%d", i%40), name: fmt.Sprintf("app-%d", i), answered: map[string]int{"NOERROR": 10}})
	}
	well := fakePod{namespace: "shop", name: "cart-6b5f-x2x7q", owner: "cart-6b5f", hash: "6b5f", labels: "app=cart", answered: map[string]int{"NOERROR": 900, "NXDOMAIN": 100}}
	warned := fakePod{namespace: "shop", name: "db-0", owner: "db", codes: []string{"nameserver_down"}, ready: "ready\nwarning: nameserver_down: 10.96.0.11 does not answer\n"}
	return map[string]*fakeCluster{
		"well": {pods: []fakePod{well, {namespace: "bank", name: "new", state: `{"waiting": {"reason": "PodInitializing"}}`}, {namespace: "bank", name: "other", state: "none"}}},
		"warn": {pods: []fakePod{well, warned}},
		"down": {},
		"none": {pods: []fakePod{{namespace: "bank", name: "other", state: "none"}}},
		"many": &many,
		"sick": {pods: []fakePod{
			well, warned, {namespace: "bank", name: "other", state: "none"},
			{namespace: "bank", name: "pay-0", owner: "pay", codes: []string{"queries_fail", "nameserver_refuses"}, answered: map[string]int{"NOERROR": 30, "SERVFAIL": 10}, ready: "503 no table yet\nproblem: queries_fail: 25 % of the \x1b[31mqueries fail\nproblem: nameserver_refuses: 10.0.0.1 refuses\nproblem: nameserver_refuses: 10.0.0.2 refuses\n"},
			{namespace: "bank", name: "pay-1", owner: "pay", codes: []string{"queries_fail"}, answered: map[string]int{"NOERROR": 30, "SERVFAIL": 10}, ready: "ready\nproblem: queries_fail: 20 % of </script> fail\n"},
			{namespace: "bank", name: "mute", codes: []string{"clock_behind"}, ready: "ready\n"},
			{namespace: "shop", name: "lost", refused: "error trying to reach service: dial tcp 10.0.0.9:15020: connect: connection refused"},
			{namespace: "shop", name: "gone", refused: `pods "gone" not found`},
			{namespace: "shop", name: "web", page: "<html></script>"}, {namespace: "shop", name: "json", page: `{"message": "Not Found"}`},
			{namespace: "shop", name: "moved", page: "cart-6b5f-x2x7q:15055/proxy/metrics"}, {namespace: "shop", name: "long", page: strings.Repeat("\n", 2<<20) + "{"},
			{namespace: "shop", name: "crashes", state: `{"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}`},
			{namespace: "shop", name: "unnamed", port: "http"},
		}},
	}
}

// ServeHTTP implements [http.Handler].
func (c *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/")
	switch {
	case c.pods == nil:
		http.Error(w, "dial tcp 10.0.0.1:443: connection refused", http.StatusBadGateway)
	case parts[0] == "pods":
		c.list(w, r, "")
	case len(parts) == 3:
		c.list(w, r, parts[1])
	default: // namespaces/NAMESPACE/pods/NAME:PORT/proxy/...
		_, again := c.asked.LoadOrStore(r.URL.Path, true)
		switch flying := c.flying.Add(1); {
		case flying > parallel:
			fail(w, http.StatusInternalServerError, "more requests than the plugin promises")
		case again && os.Getenv("ONCE") != "":
			fail(w, http.StatusInternalServerError, "the path was requested twice")
		default:
			if c.waiting.Add(-1) >= 0 {
				c.barrier.Done()
				c.barrier.Wait()
			}
			c.proxy(w, parts[1], parts[3], strings.Join(parts[5:], "/"))
		}
		c.flying.Add(-1)
	}
}

// fail writes an error as the API server does.
func fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "message": message, "code": code})
}

// list writes a page of pods.
func (c *fakeCluster) list(w http.ResponseWriter, r *http.Request, namespace string) {
	query := r.URL.Query()
	if namespace == "secret" {
		fail(w, http.StatusForbidden, `pods is forbidden: User "me" cannot list resource "pods"`)
		return
	}
	var items []string
	for _, p := range c.pods {
		if selector := query.Get("labelSelector"); (namespace == "" || namespace == p.namespace) && (selector == "" || selector == p.labels) {
			items = append(items, p.object())
		}
	}
	from, _ := strconv.Atoi(query.Get("continue"))
	limit, _ := strconv.Atoi(query.Get("limit"))
	end, next := min(from+limit, len(items)), ""
	if end < len(items) {
		next = strconv.Itoa(end)
	}
	fmt.Fprintf(w, `{"kind": "PodList", "metadata": {"continue": %q}, "items": [%s]}`, next, strings.Join(items[from:end], ","))
}

// object returns the pod in JSON.
func (p *fakePod) object() string {
	port := p.port
	if port == "" {
		port = "status"
	}
	owner, annotations, containers, statuses := "", `"nametap.dev/status": "{}"`, fmt.Sprintf(`{"name": "nametap", "ports": [{"name": %q, "containerPort": 15055}]}`, port), ""
	if p.owner != "" {
		owner = fmt.Sprintf(`{"kind": "ReplicaSet", "name": %q, "controller": true}`, p.owner)
	}
	switch p.state {
	case "none":
		annotations, containers = "", ""
	case "":
		statuses = `{"name": "nametap", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}`
	default:
		statuses = `{"name": "nametap", "state": ` + p.state + `}`
	}
	return fmt.Sprintf(`{"metadata": {"namespace": %q, "name": %q, "annotations": {%s}, "labels": {"pod-template-hash": %q}, "ownerReferences": [%s]},
		"spec": {"nodeName": "node-1", "initContainers": [%s], "containers": [{"name": "app"}]}, "status": {"initContainerStatuses": [%s]}}`,
		p.namespace, p.name, annotations, p.hash, owner, containers, statuses)
}

// proxy writes what a pod answers.
func (c *fakeCluster) proxy(w http.ResponseWriter, namespace, address, path string) {
	p := &c.pods[slices.IndexFunc(c.pods, func(p fakePod) bool { return p.namespace == namespace && p.name+":15055" == address })]
	switch {
	case strings.HasSuffix(p.refused, "not found"):
		fail(w, http.StatusNotFound, p.refused)
	case p.refused != "":
		fail(w, http.StatusServiceUnavailable, p.refused)
	case p.name == "moved":
		w.Header().Set("Location", "/api/v1/namespaces/shop/pods/"+p.page)
		w.WriteHeader(http.StatusFound)
	case path == "metrics" && p.page != "" && p.page[0] != '\n':
		http.Error(w, p.page, http.StatusNotFound)
	case path == "metrics":
		fmt.Fprint(w, p.metrics())
	case path == "healthz/ready":
		text, broken := strings.CutPrefix(p.ready, "503 ")
		if broken {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(w, text)
	default:
		fail(w, http.StatusInternalServerError, "the plugin requests "+path)
	}
}

// metrics returns what the agent measures.
func (p *fakePod) metrics() string {
	var text strings.Builder
	fmt.Fprintf(&text, "# TYPE nametap_build_info gauge\nnametap_build_info{commit=\"abc\",version=\"0.1.0\"} 1\n# TYPE nametap_problem gauge\n")
	for _, code := range p.codes {
		fmt.Fprintf(&text, "nametap_problem{code=%q} 1\n", code)
	}
	text.WriteString("nametap_problem{code=\"none\"} 0\n# TYPE nametap_dns_queries_total counter\n")
	for rcode, n := range p.answered {
		fmt.Fprintf(&text, "nametap_dns_queries_total{rcode=%q,source=\"upstream\"} %d\n", rcode, n)
	}
	fmt.Fprintf(&text, "nametap_table_hosts 1204\nnametap_xds_connected 1\nnametap_xds_table_stale 0\nnametap_xds_table_digest 1.88900977659375e+14\nnametap_xds_table_timestamp_seconds %d\n%s", time.Now().Add(-100*time.Hour).Unix(), p.page)
	return text.String()
}

// serveCluster is `kubectl proxy`: it serves the cluster that $CLUSTER names until it is killed.
func serveCluster(args []string) {
	c := scenarios()[os.Getenv("CLUSTER")]
	i := slices.IndexFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "--unix-socket=") })
	if c == nil {
		fmt.Fprintln(os.Stderr, "error: no configuration has been provided")
		os.Exit(1)
	}
	if len(c.pods) > parallel {
		c.waiting.Store(parallel)
		c.barrier.Add(parallel)
	}
	listener, err := net.Listen("unix", strings.TrimPrefix(args[i], "--unix-socket="))
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(os.Stderr, "kubectl", strings.Join(slices.Delete(slices.Clone(args), i, i+1), " "))
	fmt.Println("Starting to serve on", listener.Addr())
	panic(http.Serve(listener, c)) //nolint:gosec // a test
}
