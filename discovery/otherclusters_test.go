package discovery

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestOtherClusters checks what clients of several clusters get, as Secrets of clusters are added,
// rotated and removed.
func TestOtherClusters(t *testing.T) { // D23, D24, D25
	t.Parallel()
	f := newFleet(t, "east")
	east := f.others["east"]
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	f.own.Put(fakekube.Namespaces, rootYAML("net1"))
	putHeadless(f.own, "10.200.0.1")
	east.Put(fakekube.Services, svcYAML("shop", "web", "10.1.0.1"))
	east.Put(fakekube.Services, svcYAML("shop", "far", "10.1.0.2"))
	east.Put(fakekube.Namespaces, rootYAML("net1"))
	putHeadless(east, "10.201.0.1")
	r := start(t, f.cfg)
	mine, theirs := f.join(r, variantSotw, "mine"), f.join(r, variantDelta, "east")
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.2", "db": "10.200.0.1 10.201.0.1", "db-0.db": "10.200.0.1"})
	theirs.want(map[string]string{"web": "10.1.0.1", "far": "10.1.0.2", "db": "10.201.0.1 10.200.0.1", "db-0.db": "10.201.0.1"})

	// Another network: its endpoints cannot be reached.
	east.Put(fakekube.Namespaces, rootYAML("net2"))
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.2", "db": "10.200.0.1", "db-0.db": "10.200.0.1"})
	theirs.want(map[string]string{"web": "10.1.0.1", "far": "10.1.0.2", "db": "10.201.0.1", "db-0.db": "10.201.0.1"})

	// The API server of east refuses the old credentials. New ones lose no host.
	east.Require("new")
	wait.Until(t, "the failure is known", func() bool { return failing(r, "east") })
	east.Put(fakekube.Services, svcYAML("shop", "far", "10.1.0.3"))
	f.put("east", 1, "{token: new}")
	theirs.want(map[string]string{"web": "10.1.0.1", "far": "10.1.0.3", "db": "10.201.0.1", "db-0.db": "10.201.0.1"}, "web", "far", "db")
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.3", "db": "10.200.0.1", "db-0.db": "10.200.0.1"}, "web", "far", "db")

	// A cluster is added, and removed.
	f.others["west"] = fakekube.Start(t)
	f.others["west"].Put(fakekube.Services, svcYAML("shop", "west", "10.2.0.1"))
	f.put("west", 1, "{}")
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.3", "west": "10.2.0.1", "db": "10.200.0.1", "db-0.db": "10.200.0.1"})
	f.own.Remove(fakekube.Secrets, "istio-system/west")
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.3", "db": "10.200.0.1", "db-0.db": "10.200.0.1"})
	if f.log.Count("no Secret names the cluster any more", "cluster=west") != 1 {
		t.Error("the log does not say that the hosts of west are removed")
	}
}

// failing reports whether requests to a cluster fail.
func failing(r running, cluster string) bool {
	for _, resource := range r.Resources() {
		if resource.Cluster == cluster && resource.Failure != "" {
			return true
		}
	}
	return false
}

// TestSecretErrors checks that what is wrong with Secrets is named, and that the rest is used.
func TestSecretErrors(t *testing.T) { // D23
	t.Parallel()
	f := newFleet(t, "east", "west")
	east, west := f.others["east"], f.others["west"]
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	east.Put(fakekube.Services, svcYAML("shop", "east", "10.1.0.1"))
	west.Put(fakekube.Services, svcYAML("shop", "west", "10.2.0.1"))
	f.put("west", 10, "{}")
	f.own.Put(fakekube.Secrets, secretYAML("z-old", 20, map[string]string{"west": east.KubeconfigWith("{}"), "mine": east.KubeconfigWith("{}")}))
	cluster := func(old, new string) string { return strings.Replace(east.KubeconfigWith("{}"), old, new, 1) }
	f.own.Put(fakekube.Secrets, secretYAML("broken", 1, map[string]string{
		"authority": cluster("certificate-authority-data:", "certificate-authority: /no/such/file, x:"),
		"insecure":  cluster("certificate-authority-data:", "insecure-skip-tls-verify: true, tls-server-name:"),
		"plain":     cluster("https://", "http://"),
		"bare":      cluster("https://", ""),
		"proxy":     cluster("certificate-authority-data:", "proxy-url: socks5://192.0.2.1:1080, certificate-authority-data:"),
		"runs":      east.KubeconfigWith("{exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [/tmp/x], interactiveMode: Never}}"),
		"provider":  east.KubeconfigWith("{auth-provider: {name: gcp}}"),
		"reads":     east.KubeconfigWith("{tokenFile: /etc/passwd}"),
		"text":      "no kubeconfig", "empty": "",
	}))
	f.cfg.ClusterTimeout = 50 * time.Millisecond
	r := start(t, f.cfg)
	want := []string{
		`Secret istio-system/broken: data.authority: cluster "c" has the field certificate-authority, which is not allowed here: `,
		`Secret istio-system/broken: data.bare: cluster "c" has "127.0.0.1:`,
		`Secret istio-system/broken: data.empty: want a kubeconfig: `,
		`Secret istio-system/broken: data.insecure: cluster "c" has the field insecure-skip-tls-verify, which is not allowed here: `,
		`Secret istio-system/broken: data.plain: cluster "c" has "http://127.0.0.1:`,
		`Secret istio-system/broken: data.provider: user "u" has the field auth-provider, which is not allowed here: `,
		`Secret istio-system/broken: data.proxy: cluster "c" has the field proxy-url, which is not allowed here: `,
		`Secret istio-system/broken: data.reads: user "u" has the field tokenFile, which is not allowed here: `,
		`Secret istio-system/broken: data.runs: user "u" has the field exec, which is not allowed here: `,
		`Secret istio-system/broken: data.text: want a kubeconfig: `,
		`Secret istio-system/west: data.west: the cluster west is already in Secret istio-system/z-old, which is older; this one is ignored`,
		`Secret istio-system/z-old: data.mine: mine is this control plane's own cluster (--cluster-id)`,
	}
	var got []string
	wait.Until(t, "the errors are known", func() bool { got = errorsOf(r); return len(got) == len(want) })
	for i := range want {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("%s\nwant %s", got[i], want[i])
		}
	}
	mine := f.join(r, variantDelta, "mine")
	mine.want(map[string]string{"web": "10.0.0.1", "east": "10.1.0.1"})
	// Without the older Secret, the other one counts.
	f.own.Remove(fakekube.Secrets, "istio-system/z-old")
	f.own.Remove(fakekube.Secrets, "istio-system/broken")
	mine.want(map[string]string{"web": "10.0.0.1", "east": "10.1.0.1", "west": "10.2.0.1"})
	wait.Until(t, "there is no error", func() bool { return len(r.Errors()) == 0 })
	// A kubeconfig that becomes broken changes nothing.
	f.own.Put(fakekube.Secrets, secretYAML("east", 1, map[string]string{"east": "no kubeconfig"}))
	wait.Until(t, "the error is known", func() bool { return len(r.Errors()) == 1 && r.Errors()[0].Kept })
	east.Put(fakekube.Services, svcYAML("shop", "east", "10.1.0.2"))
	mine.want(map[string]string{"web": "10.0.0.1", "east": "10.1.0.2", "west": "10.2.0.1"}, "east", "west")
}

// errorsOf returns the errors in objects, sorted.
func errorsOf(r running) []string {
	var all []string
	for _, e := range r.Errors() {
		all = append(all, e.Error())
	}
	slices.Sort(all)
	return all
}

// TestClusterIsDown checks that a cluster whose API server is down keeps the server from being ready for a time, that
// this is said, and that its own clients are sent no table without its hosts.
func TestClusterIsDown(t *testing.T) { // D17, D28
	t.Parallel()
	f := newFleet(t, "east")
	east := f.others["east"]
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	east.Put(fakekube.Services, svcYAML("shop", "far", "10.1.0.1"))
	east.Leave()
	waits := startUnready(t, f.cfg)
	wait.Until(t, "readiness says what is missing", func() bool { return strings.Contains(waits.Waiting(), "cluster east: services cannot be read: ") })
	if chans.Closed(waits.Ready()) {
		t.Error("the server is ready at once")
	}
	f.cfg.ClusterTimeout = time.Millisecond
	r := start(t, f.cfg)
	if f.log.Count("a cluster cannot be read; its hosts are missing until it can", "cluster=east") != 1 {
		t.Error("the log does not name the cluster")
	}
	mine := f.join(r, variantDelta, "mine")
	mine.want(map[string]string{"web": "10.0.0.1"})
	err := openDelta(t, r, node(t, "shop", "CLUSTER_ID", "east"), nil).err()
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "cluster east: ") {
		t.Errorf("a client of east gets %v", err)
	}
	east.Return()
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.1"})
	// The cluster is missing until the others have its hosts.
	f.served(r, "east")
	f.join(r, variantDelta, "east").want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.1"})
	wait.Until(t, "no failure is left", func() bool { return !failing(r, "east") })
	wait.For(t, "the other server is ready", waits.Ready())
}

// served waits until clients of a cluster are served.
func (f *fleet) served(r running, cluster string) {
	f.t.Helper()
	wait.Until(f.t, "a client of "+cluster+" is served", func() bool {
		return openDelta(f.t, r, node(f.t, "shop", "CLUSTER_ID", cluster), nil).first().end == nil
	})
}

// TestTokenOfAnotherCluster checks that the API server of a client's own cluster reviews its token, and
// that no client gets the table of another cluster.
func TestTokenOfAnotherCluster(t *testing.T) { // D24, D47
	east := fakekube.Start(t)
	east.Put(fakekube.Services, svcYAML("shop", "web", "10.1.0.1"))
	east.SetToken("theirs", fakekube.Token{User: "system:serviceaccount:shop:web", Audiences: []string{"istio-ca"}})
	s := startSecuredWith(t, func(own *fakekube.API, cfg *Config) {
		own.Put(fakekube.Secrets, secretYAML("east", 1, map[string]string{"east": east.KubeconfigWith("{}")}))
		cfg.ClustersNamespace = "istio-system"
	})
	for _, tt := range []struct {
		name           string
		token, cluster string // as the client sends them
		claimed        string // in its node
		code           codes.Code
		want           string // address of web, or a part of the error
	}{
		{"own cluster", "good", "mine", "mine", codes.OK, "10.0.0.1"},
		{"own cluster, not said", "good", "", "", codes.OK, "10.0.0.1"},
		{"other cluster", "theirs", "east", "east", codes.OK, "10.1.0.1"},
		{"token for the wrong API server", "theirs", "", "east", codes.Unauthenticated, "invalid bearer token"},
		{"token of the own cluster for another one", "good", "east", "east", codes.Unauthenticated, "invalid bearer token"},
		{"claims another cluster", "good", "mine", "east", codes.PermissionDenied, `claims the cluster "east"`},
		{"claims the own cluster", "theirs", "east", "mine", codes.PermissionDenied, `claims the cluster "mine"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := reviewed(func() client {
				return openDelta(t, s.as(t, s.authority, &bearer{tt.token, tt.cluster}, nil), node(t, "shop", "CLUSTER_ID", tt.claimed), nil)
			})
			if tt.code == codes.OK && got.end == nil {
				if got := merged(t, got.tables).GetTable()["web.shop.svc.cluster.local"].GetIps(); len(got) != 1 || got[0] != tt.want {
					t.Errorf("web has the addresses %v, want %s", got, tt.want)
				}
				return
			}
			if err := got.end; status.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s with %q", err, tt.code, tt.want)
			}
		})
	}
}

// TestClusterLeaves checks that the hosts of a cluster stay while its API server is away, and are missing after a restart.
func TestClusterLeaves(t *testing.T) { // D29
	t.Parallel()
	f := newFleet(t, "east")
	east := f.others["east"]
	f.cfg.ClusterTimeout = time.Millisecond
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	east.Put(fakekube.Services, svcYAML("shop", "far", "10.1.0.2"))
	r := start(t, f.cfg)
	mine := f.join(r, variantDelta, "mine")
	mine.want(map[string]string{"web": "10.0.0.1", "far": "10.1.0.2"})
	east.Leave()
	wait.Until(t, "the failure is known", func() bool { return failing(r, "east") })
	f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.2"))
	mine.want(map[string]string{"web": "10.0.0.2", "far": "10.1.0.2"})
	r.stop()
	r = start(t, f.cfg)
	f.join(r, variantDelta, "mine").want(map[string]string{"web": "10.0.0.2"})
}
