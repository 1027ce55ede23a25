package browser

import (
	"encoding/json"
	"fmt"
	"strings"
)

// object is an object in JSON.
type object = map[string]any

// counts returns numbers of queries.
func counts(queries, failures int) object { return object{"queries": queries, "failures": failures} }

// A workload describes the pods of a workload in the fleet of the tests.
type workload struct {
	namespace, name string
	pods            int
	state           string // of the first pods
	sick            int    // how many pods have this state
	problems        []object
	failing         int // the share of their queries that fail at the end, in percent
}

// hostile is a text that a page may not read as HTML.
const hostile = `<img src=x onerror="document.title='broken'"></script><script>document.title='broken'</script>`

// workloads returns a fleet in which one namespace is sick, because of one nameserver.
func workloads() []workload {
	problem := func(code, severity, what string) object {
		return object{"code": code, "severity": severity, "what": what}
	}
	refuses := []object{
		problem("nameserver_refuses", "problem", "10.96.0.53, the nameserver of corp.example, refuses queries"),
		problem("queries_fail", "problem", "30 % of the queries fail"),
	}
	return []workload{
		{namespace: "payments", name: "ledger", pods: 6, state: "problem", sick: 6, problems: refuses, failing: 30},
		{namespace: "payments", name: "gateway", pods: 8, state: "problem", sick: 5, problems: refuses, failing: 20},
		{namespace: "payments", name: "mail", pods: 3},
		{namespace: "batch", name: "report", pods: 9, state: "problem", sick: 4, problems: []object{problem("token_expired", "problem", "the token has expired at 2026-01-05T03:00:00Z, so the table is 7h old")}},
		{namespace: "edge", name: "proxy", pods: 12, state: "unknown", sick: 1, problems: []object{problem("no_reply", "unknown", "no reply in 5s")}},
		{namespace: "ml", name: "train", pods: 5, state: "warning", sick: 5, problems: []object{problem("nameserver_down", "warning", "10.96.0.11, the second nameserver, does not reply")}},
		{namespace: "shop", name: "web", pods: 30},
		{namespace: "shop", name: "cart", pods: 12},
		{namespace: "shop", name: "search", pods: 8},
		{namespace: "auth", name: "auth", pods: 6},
		{namespace: "data", name: "db", pods: 5},
	}
}

// fleet returns the agents as `kubectl nametap fleet --output json` prints them.
func fleet() []byte {
	var lines strings.Builder
	for _, w := range workloads() {
		for i := range w.pods {
			line, err := json.Marshal(w.agent(i))
			if err != nil {
				panic(err)
			}
			fmt.Fprintf(&lines, "%s\n", line)
		}
	}
	return []byte(lines.String())
}

// agent returns the agent in a pod.
func (w *workload) agent(i int) object {
	const parts, perPart = 20, 90
	a := object{
		"namespace": w.namespace, "workload": w.name, "name": fmt.Sprintf("%s-%d", w.name, i), "node": fmt.Sprintf("node-%d", 7*i%40),
		"state": "ok", "version": "0.1.0", "connected": true, "queries": 100000, "failures": 0,
		"table": object{"hosts": 1204, "ageSeconds": 40 + 60*i, "digest": "9f3ab2c1d0e4", "stale": false},
	}
	var curve []object
	total, failing := 0, 0
	if w.name == "gateway" && i == 0 {
		a["node"] = hostile
	}
	if i < w.sick {
		a["state"], a["problems"], failing = w.state, w.problems, w.failing
	}
	for part := range parts {
		failures := perPart * failing * max(0, part-5) / (parts - 6) / 100
		total += failures
		curve = append(curve, counts(perPart, failures))
	}
	a["recent"] = object{"seconds": 60, "queries": parts * perPart, "failures": total, "curve": curve}
	if w.state == "unknown" && i < w.sick {
		for _, key := range []string{"table", "recent", "version"} {
			delete(a, key)
		}
	}
	return a
}
