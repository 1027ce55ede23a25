package interop

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// An istiod is an unmodified istiod in the namespace of its cluster.
type istiod struct {
	*cluster
	process *daemon
	options options
}

// options are how an istiod differs from the default.
type options struct {
	offset int      // of its ports
	args   []string // more arguments
	env    []string // more environment
}

// istiod starts an istiod, and returns when it is ready.
func (c *cluster) istiod(o options) *istiod {
	c.tb.Helper()
	d := &istiod{cluster: c, options: o}
	d.start()
	return d
}

// port returns the port that d uses in place of a usual port of istiod.
func (d *istiod) port(usual int) string { return strconv.Itoa(usual + d.options.offset) }

// start starts istiod, also after its end, and returns when it is ready.
func (d *istiod) start() {
	d.tb.Helper()
	d.launch()
	d.awaitReady()
}

// launch starts istiod without waiting.
func (d *istiod) launch() {
	d.tb.Helper()
	name := "istiod-" + strconv.Itoa(d.options.offset)
	cmd := exec.Command(d.istio, append([]string{
		"discovery", "--registries=Kubernetes", "--kubeconfig", d.path("kubeconfig"), "--meshConfig", d.path("mesh.yaml"),
		"--networksConfig=/nonexistent", "--ctrlz_address=127.0.0.1", "--ctrlz_port=" + d.port(9876),
		"--grpcAddr=:" + d.port(15010), "--secureGRPCAddr=:" + d.port(15012), "--httpAddr=127.0.0.1:" + d.port(15080),
		"--httpsAddr=127.0.0.1:" + d.port(15017), "--monitoringAddr=127.0.0.1:" + d.port(15014),
	}, d.options.args...)...)
	cmd.Env = append(os.Environ(), append([]string{"POD_NAME=" + name, "POD_NAMESPACE=istio-system", "CLUSTER_ID=Kubernetes"}, d.options.env...)...)
	d.process = d.run(name, cmd)
}

// awaitReady waits until istiod is ready.
func (d *istiod) awaitReady() {
	d.tb.Helper()
	d.process.await("istiod is ready", func() bool {
		status, _ := d.debug("/ready", nil)
		return status == http.StatusOK
	})
}

// debug returns the answer of one of istiod's endpoints for debugging; the status is 0 without
// an answer.
func (d *istiod) debug(path string, query url.Values) (status int, body []byte) {
	d.tb.Helper()
	response, err := d.client.Get("http://127.0.0.1:" + d.port(15080) + path + "?" + query.Encode())
	if err != nil {
		return 0, nil
	}
	defer response.Body.Close()
	if body, err = io.ReadAll(response.Body); err != nil {
		return 0, nil
	}
	return response.StatusCode, body
}

// table returns the NameTable that istiod has for a connected proxy; ok is false if the proxy
// is not connected.
func (d *istiod) table(proxy string) (t table, ok bool) {
	d.tb.Helper()
	status, body := d.debug("/debug/ndsz", url.Values{"proxyID": {proxy}})
	if status != http.StatusOK {
		return nil, false
	}
	var dump struct{ Configs []struct{ Table table } }
	if err := json.Unmarshal(body, &dump); err != nil {
		d.tb.Fatalf("/debug/ndsz of %s: %v\n%s", proxy, err, body)
	}
	if len(dump.Configs) != 1 {
		return nil, false
	}
	return dump.Configs[0].Table.normal(), true
}

// A table is a NameTable by host.
type table map[string]entry

// An entry is the entry of a host in a table.
type entry struct {
	IPs       []string `json:"ips"`
	Registry  string   `json:"registry"`
	Shortname string   `json:"shortname"`
	Namespace string   `json:"namespace"`

	// istiod's tables have none of these.
	Alias        string        `json:"alias"`
	Headless     bool          `json:"headless"`
	Ports        []port        `json:"ports"`
	Destinations []destination `json:"destinations"`
}

// A port is a port of a Service.
type port struct {
	Name     string   `json:"name"`
	Number   int      `json:"number"`
	Protocol string   `json:"protocol"`
	IPs      []string `json:"ips"`
}

// A destination is where connections to a port of an external host lead.
type destination struct {
	Port      int      `json:"port"`
	Target    int      `json:"target"`
	Endpoints []string `json:"endpoints"`
}

// String returns what is compared.
func (e entry) String() string {
	text := fmt.Sprintf("%v %s", e.IPs, e.Registry)
	if e.Shortname != "" {
		text += fmt.Sprintf(" %s.%s", e.Shortname, e.Namespace)
	}
	if e.Alias != "" {
		text += " alias " + e.Alias
	}
	return text
}

// normal returns the table with the addresses of each host sorted and without duplicates.
// istiod sends them in a changing order.
func (t table) normal() table {
	for host, e := range t {
		slices.Sort(e.IPs)
		e.IPs = slices.Compact(e.IPs)
		t[host] = e
	}
	return t
}

// diff returns a line for each entry in which t differs from other; it is empty if they are
// equal.
func (t table) diff(other table) string {
	var lines []string
	for host, e := range t {
		if o, found := other[host]; !found {
			lines = append(lines, fmt.Sprintf("- %s %v", host, e))
		} else if o.String() != e.String() {
			lines = append(lines, fmt.Sprintf("- %s %v\n+ %s %v", host, e, host, o))
		}
	}
	for host, o := range other {
		if _, found := t[host]; !found {
			lines = append(lines, fmt.Sprintf("+ %s %v", host, o))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// wantTable waits until an agent's table is istiod's for this agent.
func (d *istiod) wantTable(a *agent) table {
	a.tb.Helper()
	var want table
	var diff string
	defer func() {
		if diff != "" {
			a.tb.Errorf("istiod (-) and the agent (+) have different tables:\n%s", diff)
		}
	}()
	wait.Until(a.tb, "the agent's table matches istiod's", func() bool {
		var ok bool
		if want, ok = d.table(a.proxy()); !ok {
			diff = "istiod has no stream of " + a.proxy()
			return false
		}
		diff = want.diff(a.table())
		return diff == ""
	})
	return want
}
