package inject_test

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/testkit/fakexds"
)

// TestConfig checks that a file of settings is read strictly.
func TestConfig(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"mode: resolv\nnameservers: [10.96.0.10]\n": "",
		"": "",
		"{mode: rules, settings: {cache-size: 8MiB}}": "",
		"image: 'A:'\nsettings: {nope: 1, ttl: 30}\n": "such as registry.example.com/nametap:0.1.0\nsettings: \"nope\": want the name of a flag of `nametap agent`, without --\nsettings: ttl",
		"mod: rules\n":                                                   "mod",
		"image: a\nimage: b\n":                                           "already defined",
		"image: a\n---\nimage: b\n":                                      "one document",
		"image: [a]\n":                                                   "cannot unmarshal",
		"mode: resolv\n":                                                 "needs the addresses of the cluster's DNS",
		"mode: resolv\nnameservers: [kube-dns]\n":                        `"kube-dns": want an IP address`,
		"controlPlane: istiod\n":                                         `controlPlane "istiod": want host:port`,
		"imagePullPolicy: never\n":                                       `imagePullPolicy "never": want Always`,
		"settings: {xds-addr: 'x:1'}\n":                                  "follows from: controlPlane",
		"settings: {--cache-size: 8MiB}\n":                               `"--cache-size": want the name of a flag`,
		"ignoredNamespaces: []\nrootCert: other-config\n":                "",
		"resources: {limits: {cpu: 1, memory: ''}}\n":                    "",
		"resources: {limits: {gpu: 1}}\n":                                `resources: limits: "gpu": want cpu or memory`,
		"resources: {requests: {memory: 1Gi}}\n":                         "above the limit 192Mi",
		"resources: {requests: {memory: 1Mi}, limits: {memory: 20Mi}}\n": "at least 32Mi",
		"settings: {ttl: 30}\n":                                          `settings: ttl: "30": want a duration`,
		"settings: {cache-size: 8MB}\n":                                  `settings: cache-size: "8MB": want a number of bytes`,
		"settings: {xds-plaintext: maybe}\n":                             "want true or false",
		"settings: {upstream-parallel: true}\n":                          `"upstream-parallel": want the name of a flag`,
		"settings: {xds-plaintext: true, log-level: debug, bypass: 'a,b', ttl: 1m}\n":                 "",
		"settings: {log-level: loud}\n":                                                               "want debug, info, warn or error",
		"settings: {dnstap: 'unix:///a', query-log: all}\n":                                           "",
		"settings: {dnstap: 'tcp://[::1]:6000'}\n":                                                    "",
		"settings: {dnstap: 'tcp://a:65536'}\n":                                                       "want unix:///PATH or tcp://HOST:PORT",
		"settings: {egress: true, egress-source: '10.0.0.1'}\n":                                       "",
		"{mode: resolv, nameservers: [10.96.0.10], settings: {egress: true}}":                         "no rules that redirect connections to VIPs",
		"settings: {egress: true, egress-mark: 7}\n":                                                  "egress-mark: 7: the agent in a pod has no CAP_NET_ADMIN",
		"settings: {query-log: some}\n":                                                               `settings: query-log: "some": want off, failed or all`,
		"image: 'nametap:0.1.0 '\n":                                                                   `image: "nametap:0.1.0 ": want the name of an image`,
		"settings: {ttl: 0s}\n":                                                                       `settings: ttl: "0s": want 1s to 596523h14m7s`,
		"settings: {upstream-timeout: 0s}\n":                                                          "want more than 0",
		"settings: {egress-mark: 4294967296}\n":                                                       "want a whole number from 0 to 4294967295",
		"settings: {cache-size: 0, drain: 0s, serve-stale: 0, egress-mark: 0}\n":                      "",
		"image: registry.example.com:5000/a/nametap:v1.2_3@sha256:" + strings.Repeat("0a", 32) + "\n": "",
		"rootCert: Other\n":                                                                           `rootCert: "Other": want the name of a ConfigMap`,
		"clusterDomain: 'a b'\n":                                                                      `clusterDomain: "a b": want a domain`,
		"clusterID: \"a\\tb\"\n":                                                                      "clusterID",
		"controlPlane: 'istiod:70000'\n":                                                              "want host:port",
		"controlPlane: 'https://istiod:15012'\n":                                                      "want host:port",
		"controlPlane: '[fd00::1]:15012'\n":                                                           "",
		"nameservers: [127.0.0.53]\n":                                                                 "the agent itself",
		"nameservers: ['fe80::1%eth0']\n":                                                             "want an IP address",
		"ignoredNamespaces: [Kube_System]\n":                                                          `ignoredNamespaces: "Kube_System": want the name of a namespace`,
	} {
		cfg, err := inject.ParseConfig([]byte(text))
		if err == nil {
			err = cfg.Check()
		}
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestConfigDocument checks that docs/injection.md has every key with its default, or an example
// for keys without one.
func TestConfigDocument(t *testing.T) { // R7
	t.Parallel()
	text, err := os.ReadFile("../docs/injection.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, found := strings.Cut(string(text), "    # inject.yaml\n")
	block, _, ended := strings.Cut(block, "\n\n")
	if !found || !ended {
		t.Fatal("docs/injection.md has no inject.yaml")
	}
	file := strings.ReplaceAll("\n"+block, "\n    ", "\n")
	cfg, err := inject.ParseConfig([]byte(file))
	if err != nil {
		t.Fatal(err)
	}
	if err := cfg.Check(); err != nil {
		t.Error(err)
	}
	keys := regexp.MustCompile(`(?m)^\w+:`).FindAllString(file, -1)
	if fields := reflect.TypeFor[inject.Config]().NumField() - 3; len(keys) != fields { // RootCAs, Policy and ProxyMetadata are not in the file
		t.Errorf("%d keys of %d: %q", len(keys), fields, keys)
	}
	cfg.ControlPlane, cfg.ClusterID, cfg.RootCAFiles, cfg.Nameservers, cfg.ImagePullSecrets, cfg.Settings = "", "", nil, nil, nil, nil
	if diff := cmp.Diff(inject.DefaultConfig(), cfg); diff != "" {
		t.Errorf("docs/injection.md (-defaults +document):\n%s", diff)
	}
}

// TestRootCAs checks that a pod gets the certificates of all files, in place of earlier ones, and none with a ConfigMap.
func TestRootCAs(t *testing.T) { // I20
	t.Parallel()
	dir := t.TempDir()
	var cfg inject.Config
	var want strings.Builder
	for i := range 2 {
		root := fakexds.NewAuthority(t, "discovery.test", "spiffe://cluster.local/ns/shop/sa/web").Root()
		want.WriteString(root)
		cfg.RootCAFiles = append(cfg.RootCAFiles, filepath.Join(dir, strconv.Itoa(i)))
		if err := os.WriteFile(cfg.RootCAFiles[i], []byte("\n"+root), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := cfg.ReadRootCAs(); err != nil {
		t.Fatal(err)
	}
	const text = "metadata: {name: app, annotations: {nametap.dev/root-cas: old}}\nspec: {containers: [{name: app, image: app}]}\n"
	annotated := injectText(t, text, cfg)
	for name, pod := range map[string]corev1.Pod{"new": typed(t, annotated), "again": injected(t, injectText(t, text, inject.Config{}), cfg)} {
		if diff := cmp.Diff(want.String(), pod.Annotations["nametap.dev/root-cas"]); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "nametap-root-cert" })
		if files := pod.Spec.Volumes[i].DownwardAPI; files == nil || files.Items[0].Path != "root-cert.pem" || files.Items[0].FieldRef.FieldPath != "metadata.annotations['nametap.dev/root-cas']" {
			t.Errorf("%s: the volume is %+v", name, pod.Spec.Volumes[i])
		}
	}
	if pod := injected(t, annotated, inject.Config{}); pod.Annotations["nametap.dev/root-cas"] != "" || pod.Spec.Volumes[1].ConfigMap == nil {
		t.Errorf("with a ConfigMap: %+v", pod)
	}
	if err := os.WriteFile(cfg.RootCAFiles[1], []byte("broken"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := cfg.ReadRootCAs(); err == nil || !strings.Contains(err.Error(), cfg.RootCAFiles[1]+": want certificates in PEM") {
		t.Errorf("a broken file: %v", err)
	}
}
