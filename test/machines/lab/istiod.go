package lab

import (
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
)

// IstiodOptions are how an istiod differs from the default.
type IstiodOptions struct {
	Offset int      // of its ports
	Args   []string // more arguments
	Env    []string // more environment
}

// An Istiod is an unmodified istiod in the place of its cluster.
type Istiod struct {
	*Cluster
	Process *Process
	options IstiodOptions
}

// ApplyIstio makes the custom resource definitions and the namespace of Istio.
func (c *Cluster) ApplyIstio() {
	c.TB.Helper()
	c.Apply(c.Read(PeerPath(c.TB, "istiod", "istio.io/istio", "manifests/charts/base/files/crd-all.gen.yaml")))
	c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system}\n")
}

// Istiod starts an istiod with the mesh configuration in mesh.yaml, and returns when it is ready.
func (c *Cluster) Istiod(o IstiodOptions) *Istiod {
	c.TB.Helper()
	d := &Istiod{Cluster: c, options: o}
	d.Launch()
	d.AwaitReady()
	return d
}

// Port returns the port that d uses in place of a usual port of istiod.
func (d *Istiod) Port(usual int) string { return strconv.Itoa(usual + d.options.Offset) }

// Launch starts istiod, also after its end, without waiting.
func (d *Istiod) Launch() {
	d.TB.Helper()
	name := "istiod-" + strconv.Itoa(d.options.Offset)
	cmd := d.Command(d.TB.Context(), slices.Concat([]string{
		Peer(d.TB, "istiod"), "discovery", "--registries=Kubernetes", "--kubeconfig", d.Path("kubeconfig"), "--meshConfig", d.Path("mesh.yaml"),
		"--networksConfig=/nonexistent", "--ctrlz_address=127.0.0.1", "--ctrlz_port=" + d.Port(9876),
		"--grpcAddr=:" + d.Port(15010), "--secureGRPCAddr=:" + d.Port(15012), "--httpAddr=127.0.0.1:" + d.Port(15080),
		"--httpsAddr=127.0.0.1:" + d.Port(15017), "--monitoringAddr=127.0.0.1:" + d.Port(15014),
	}, d.options.Args)...)
	cmd.Env = append(os.Environ(), append([]string{"POD_NAME=" + name, "POD_NAMESPACE=istio-system", "CLUSTER_ID=Kubernetes"}, d.options.Env...)...)
	d.Process = d.Spawn(name, cmd)
}

// AwaitReady waits until istiod is ready.
func (d *Istiod) AwaitReady() {
	d.TB.Helper()
	d.Process.Await("istiod is ready", func() bool {
		status, _ := d.Place.Get("http://127.0.0.1:" + d.Port(15080) + "/ready")
		return status == http.StatusOK
	})
}

// Table returns the NameTable that istiod has for a connected proxy; ok is false if the proxy is not connected.
func (d *Istiod) Table(proxy string) (t Table, ok bool) {
	d.TB.Helper()
	status, body := d.Place.Get("http://127.0.0.1:" + d.Port(15080) + "/debug/ndsz?" + url.Values{"proxyID": {proxy}}.Encode())
	if status != http.StatusOK {
		return nil, false
	}
	var dump struct{ Configs []struct{ Table Table } }
	if err := json.Unmarshal([]byte(body), &dump); err != nil {
		d.TB.Fatalf("/debug/ndsz of %s: %v\n%s", proxy, err, body)
	}
	if len(dump.Configs) != 1 {
		return nil, false
	}
	return dump.Configs[0].Table.normal(), true
}
