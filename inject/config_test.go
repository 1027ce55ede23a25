package inject_test

import (
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/inject"
)

// TestConfig checks that a file of settings is read strictly.
func TestConfig(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"mode: resolv\nnameservers: [10.96.0.10]\n": "",
		"": "",
		"{mode: rules, settings: {cache-size: 8MiB}}": "",
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
		"settings: {cach-size: 8MiB}\n":                                  "`nametap agent`, without --: did you mean cache-size?",
		"settings: {drian: 1s}\n":                                        "did you mean drain?",
		"settings: {exclude-uid: 1}\n":                                   "did you mean capture-exclude-uid?",
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
		"image: 'nametap:0.1.0 '\n":                                                                   `image "nametap:0.1.0 ": want the name of an image`,
		"settings: {ttl: 0s}\n":                                                                       `settings: ttl: "0s": want 1s to 596523h14m7s`,
		"settings: {upstream-timeout: 0s}\n":                                                          "want more than 0",
		"settings: {egress-mark: 4294967296}\n":                                                       "want a whole number from 0 to 4294967295",
		"settings: {cache-size: 0, drain: 0s, serve-stale: 0, egress-mark: 0}\n":                      "",
		"image: registry.example.com:5000/a/nametap:v1.2_3@sha256:" + strings.Repeat("0a", 32) + "\n": "",
		"rootCert: Other\n":                                                                           `rootCert "Other": want the name of a ConfigMap`,
		"clusterDomain: 'a b'\n":                                                                      `clusterDomain "a b": want a domain`,
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
	if fields := reflect.TypeFor[inject.Config]().NumField() - 1; len(keys) != fields { // ProxyMetadata is not in the file
		t.Errorf("%d keys of %d: %q", len(keys), fields, keys)
	}
	cfg.ControlPlane, cfg.ClusterID, cfg.Nameservers, cfg.ImagePullSecrets, cfg.Settings = "", "", nil, nil, nil
	if diff := cmp.Diff(inject.DefaultConfig(), cfg); diff != "" {
		t.Errorf("docs/injection.md (-defaults +document):\n%s", diff)
	}
}
