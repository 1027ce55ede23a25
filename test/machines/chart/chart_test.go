package chart

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/test/machines/lab"
)

const (
	chart     = "../../../deploy/chart"
	manifests = "../../../deploy/kubernetes"
	namespace = "nametap-system"
)

// versions runs a test with each version of Helm.
func versions(t *testing.T, test func(h helm)) {
	t.Helper()
	for _, version := range []string{"helm3", "helm4"} {
		t.Run(version, func(t *testing.T) { test(helm{t, lab.Peer(t, version)}) })
	}
}

// helm is a command of Helm, whose files are in a directory of the test.
type helm struct {
	t    *testing.T
	path string
}

// run runs a command of Helm, and returns its outputs.
func (h helm) run(args ...string) (stdout, stderr string, err error) {
	h.t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(h.t.Context(), h.path, args...)
	cmd.Env = append(os.Environ(), "HOME="+h.t.TempDir(), "KUBECONFIG=/nonexistent")
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// template renders the chart with values in JSON.
func (h helm) template(values string) (objects, error) {
	h.t.Helper()
	file := filepath.Join(h.t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		h.t.Fatal(err)
	}
	stdout, stderr, err := h.run("template", "nametap", chart, "--namespace", namespace, "--include-crds", "--kube-version", "1.36.1", "--values", file)
	if err != nil {
		return nil, fmt.Errorf("helm template: %w\n%s", err, stderr)
	}
	return parse(h.t, stdout), nil
}

// render renders the chart with values that are right, and checks that the objects are valid and fit each other.
func (h helm) render(values string) objects {
	h.t.Helper()
	rendered, err := h.template(values)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, problem := range check(rendered) {
		h.t.Errorf("%s\n%s", problem, values)
	}
	return rendered
}

// objects are objects by their kinds, namespaces and names.
type objects map[string]map[string]any

// parse reads YAML documents.
func parse(t *testing.T, text string) objects {
	t.Helper()
	all := objects{}
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		var o map[string]any
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if o == nil {
			continue
		}
		metadata, _ := o["metadata"].(map[string]any)
		namespace, _ := metadata["namespace"].(string)
		key := strings.TrimSpace(fmt.Sprintf("%s %s/%s", o["kind"], namespace, metadata["name"]))
		if _, twice := all[key]; twice {
			t.Errorf("%s is there twice", key)
		}
		all[key] = o
	}
}

// read reads an object.
func read[T any](t *testing.T, all objects, key string) T {
	t.Helper()
	o, ok := all[key]
	if !ok {
		t.Fatalf("no %s in %q", key, slices.Sorted(maps.Keys(all)))
	}
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var typed T
	if err := kyaml.UnmarshalStrict(text, &typed); err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return typed
}

// The objects of the chart that have values.
const (
	deployment = "Deployment " + namespace + "/nametap-discovery"
	service    = "Service " + namespace + "/nametap-discovery"
	policy     = "NetworkPolicy " + namespace + "/nametap-discovery"
	settings   = "ConfigMap " + namespace + "/nametap-inject"
)

// TestLint checks that Helm finds nothing to improve.
func TestLint(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		stdout, stderr, err := h.run("lint", "--strict", chart)
		if err != nil || !strings.Contains(stdout, "1 chart(s) linted, 0 chart(s) failed") || strings.Contains(stdout, "[WARNING]") {
			t.Errorf("%v\n%s%s", err, stdout, stderr)
		}
	})
}

// TestSettings checks that the settings of injection equal the settings of `nametap inject`. TestTexts changes them.
func TestSettings(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		parsed := func(values string) inject.Config {
			t.Helper()
			return injection(t, h.render(values))
		}
		want := inject.DefaultConfig()
		want.ControlPlane, want.RootCAFiles = "nametap-discovery."+namespace+".svc:15012", []string{"/etc/nametap-tls/ca.crt"}
		if diff := cmp.Diff(want, parsed("{}")); diff != "" {
			t.Errorf("by default:\n%s", diff)
		}
		want.ControlPlane, want.RootCAFiles = "istiod.istio-system.svc:15012", nil
		if diff := cmp.Diff(want, parsed("{discovery: {enabled: false}}")); diff != "" {
			t.Errorf("with istiod:\n%s", diff)
		}
		if got := injection(t, h.render("{injection: {guard: sandbox}}")).Guard; got != "sandbox" {
			t.Errorf("the guard is %q", got)
		}
	})
}

// injection returns the settings of injection.
func injection(t *testing.T, all objects) inject.Config {
	t.Helper()
	text := read[corev1.ConfigMap](t, all, settings).Data["inject.yaml"]
	cfg, err := inject.ParseConfig([]byte(text))
	if err == nil {
		err = cfg.Check()
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return cfg
}

// TestValues changes the values of nametap-discovery.
func TestValues(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{image: {registry: registry.example.com, tag: "1.2", pullPolicy: Always, pullSecrets: [one, two]}, discovery: {
			replicas: 3, plaintext: false, settings: {log-level: debug, max-clients: 5000000, allow-empty: true}, resources: {limits: {memory: 1Gi}},
			podLabels: {team: mesh}, podAnnotations: {a: b}, priorityClassName: system-cluster-critical, nodeSelector: {disk: ssd},
			tolerations: [{key: k, operator: Exists}], affinity: {nodeAffinity: {}},
			networkPolicy: {clients: [192.0.2.0/24, "2001:db8::/32"], apiServerPorts: [8443]}}}`)
		d := read[appsv1.Deployment](t, all, deployment)
		pod := d.Spec.Template
		container := pod.Spec.Containers[0]
		got := map[string]any{
			"replicas": *d.Spec.Replicas, "image": container.Image, "pull": container.ImagePullPolicy, "secrets": pod.Spec.ImagePullSecrets, "labels": pod.Labels,
			"annotations": pod.Annotations, "memory": container.Resources.Limits.Memory().String(), "requests": len(container.Resources.Requests),
			"priority": pod.Spec.PriorityClassName, "nodes": pod.Spec.NodeSelector, "tolerations": pod.Spec.Tolerations, "affinity": pod.Spec.Affinity.NodeAffinity != nil,
			"args": container.Args, "ports": len(container.Ports), "service": len(read[corev1.Service](t, all, service).Spec.Ports),
		}
		want := map[string]any{
			"replicas": int32(3), "image": "registry.example.com/nametap-discovery:1.2", "pull": corev1.PullAlways,
			"secrets": []corev1.LocalObjectReference{{Name: "one"}, {Name: "two"}}, "labels": map[string]string{
				"app": "nametap-discovery", "team": "mesh", "app.kubernetes.io/name": "nametap", "app.kubernetes.io/instance": "nametap",
				"app.kubernetes.io/component": "nametap-discovery", "app.kubernetes.io/version": version.Release(),
			},
			"annotations": map[string]string{"a": "b", "prometheus.io/scrape": "true", "prometheus.io/port": "15014", "prometheus.io/path": "/metrics"},
			"memory":      "1Gi", "requests": 2, "priority": "system-cluster-critical",
			"nodes": map[string]string{"disk": "ssd"}, "tolerations": []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}, "affinity": true,
			"args": []string{
				"--tls-addr=:15012", "--tls-cert=/etc/nametap-tls/tls.crt", "--tls-key=/etc/nametap-tls/tls.key",
				"--inject-addr=:15017", "--inject-config=/etc/nametap-inject/inject.yaml", "--allow-empty=true", "--log-level=debug", "--max-clients=5000000",
			},
			"ports": 3, "service": 3,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("Deployment:\n%s", diff)
		}
		rules := read[networkingv1.NetworkPolicy](t, all, policy).Spec
		if from := rules.Ingress[0].From; len(from) != 3 || from[2].IPBlock.CIDR != "2001:db8::/32" || len(rules.Ingress[0].Ports) != 2 || rules.Egress[1].Ports[0].Port.IntValue() != 8443 {
			t.Errorf("NetworkPolicy: %+v", rules)
		}
		if _, ok := h.render("{discovery: {networkPolicy: {enabled: false}}}")[policy]; ok {
			t.Error("a NetworkPolicy that is switched off")
		}
		withFiles := read[appsv1.Deployment](t, h.render(`{discovery: {settings: {config-dir: /state/own, kubeconfig: /etc/k/config}, extraVolumes: [{name: state, emptyDir: {sizeLimit: 1Gi}},
			{name: k, secret: {secretName: k}}], extraVolumeMounts: [{name: state, mountPath: /state}, {name: k, mountPath: /etc/k, readOnly: true}]}}`), deployment).Spec.Template.Spec
		if args := withFiles.Containers[0].Args; len(withFiles.Volumes) != 4 || len(withFiles.Containers[0].VolumeMounts) != 4 || !slices.Contains(args, "--config-dir=/state/own") {
			t.Errorf("with files: %+v", withFiles)
		}
		// With istiod, only settings are left.
		rest := h.render("{discovery: {enabled: false}}")
		maps.DeleteFunc(rest, func(key string, _ map[string]any) bool { return strings.HasPrefix(key, "CustomResourceDefinition ") })
		if diff := cmp.Diff([]string{settings}, slices.Sorted(maps.Keys(rest))); diff != "" {
			t.Errorf("with istiod:\n%s", diff)
		}
	})
}

// TestOtherNamespace checks that nothing of the chart depends on the name of its namespace, which is never
// injected, also if it looks like a number.
func TestOtherNamespace(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		for _, other := range []string{"mesh", "1e3"} {
			stdout, stderr, err := h.run("template", "nametap", chart, "--namespace", other, "--kube-version", "1.36.1", "--set", "injection.webhook=true")
			if err != nil {
				t.Fatalf("%v\n%s", err, stderr)
			}
			if strings.Contains(stdout, namespace) || strings.Contains(stdout, "namespace: 1e3") {
				t.Errorf("%s, or a namespace that is a number, is in:\n%s", namespace, stdout)
			}
			all := parse(t, stdout)
			for key := range all {
				if kind, name, _ := strings.Cut(key, " "); !strings.HasPrefix(name, other+"/") && !strings.HasPrefix(kind, "ClusterRole") && kind != "MutatingWebhookConfiguration" {
					t.Errorf("%s is not in the namespace of the release", key)
				}
			}
			cfg, err := inject.ParseConfig([]byte(read[corev1.ConfigMap](t, all, "ConfigMap "+other+"/nametap-inject").Data["inject.yaml"]))
			if err != nil || !slices.Contains(cfg.IgnoredNamespaces, other) || cfg.ControlPlane != "nametap-discovery."+other+".svc:15012" {
				t.Errorf("%v, %+v", err, cfg)
			}
			for _, hook := range read[admissionv1.MutatingWebhookConfiguration](t, all, hooks).Webhooks {
				if hook.ClientConfig.Service.Namespace != other {
					t.Errorf("%+v", hook.ClientConfig.Service)
				}
			}
		}
	})
}

// TestRefused checks that values that are wrong, that cannot work together, or with which injection would refuse all pods,
// are refused, and that the error names them. Values that are similar and right are not.
func TestRefused(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		for values, parts := range map[string][]string{
			`{replicas: 3}`:                                                {"replicas"},
			`{discovery: {replica: 3}}`:                                    {"discovery", "replica"},
			`{discovery: {replicas: 0}}`:                                   {"discovery", "replicas"},
			`{discovery: {replicas: two}}`:                                 {"discovery", "replicas"},
			`{discovery: {settings: {tls-addr: ":1"}}}`:                    {"tls-addr"},
			`{discovery: {settings: {--log-level: debug}}}`:                {"--log-level"},
			`{discovery: {settings: {log-level: [debug]}}}`:                {"discovery", "settings", "log-level"},
			`{discovery: {podLabels: {app: other}}}`:                       {"'app'"},
			`{discovery: {networkPolicy: {client: [192.0.2.0/24]}}}`:       {"discovery", "networkPolicy", "client"},
			`{discovery: {networkPolicy: {clients: [vm.example.com]}}}`:    {"discovery", "networkPolicy", "clients"},
			`{discovery: {networkPolicy: {clients: [192.0.2.0/33]}}}`:      {"discovery", "networkPolicy", "clients"},
			`{discovery: {tolerations: [{operator: Exists, value: a}]}}`:   {"tolerations"},
			`{discovery: {tolerations: [{operator: Equal, value: a}]}}`:    {"tolerations"},
			`{discovery: {tolerations: [{key: a b}]}}`:                     {"tolerations"},
			`{discovery: {tolerations: [{key: a, tolerationSeconds: 1}]}}`: {"tolerations"},
			`{discovery: {networkPolicy: {apiServerPorts: []}}}`:           {"discovery", "networkPolicy", "apiServerPorts"},
			`{discovery: {settings: {kubeconfig: /etc/k/config}}}`:         {`discovery.settings.kubeconfig is "/etc/k/config"`, "discovery.extraVolumeMounts"},
			`{discovery: {settings: {config-dir: /s}, extraVolumes: [{name: s, emptyDir: {}}], extraVolumeMounts: [{name: s, mountPath: /sa}]}}`: {`discovery.settings.config-dir is "/s"`},
			`{discovery: {extraVolumeMounts: [{name: s, mountPath: /s}]}}`:                                                                       {`mounts "s"`, "discovery.extraVolumes: add it"},
			`{discovery: {extraVolumes: [{name: inject, emptyDir: {}}]}}`:                                                                        {"extraVolumes"},
			`{discovery: {extraVolumes: [{name: a, emptyDir: {}}, {name: a, emptyDir: {}}]}}`:                                                    {`"a" twice`},
			`{discovery: {extraVolumes: [{name: a, emptyDir: {}}], extraVolumeMounts: [{name: a, mountPath: /etc/nametap-inject}]}}`:             {"second volume"},
			`{discovery: {resources: {requests: {memory: lots}}}}`:                                                                               {"resources"},
			`{image: {repository: nametap}}`:                                                                                                     {"image", "repository"},
			`{image: {registry: registry.example.com/}}`:                                                                                         {"image", "registry"},
			`{image: {pullPolicy: Sometimes}}`:                                                                                                   {"image", "pullPolicy"},
			`{discovery: {enabled: false}, injection: {webhook: true}}`:                                                                          {"injection.webhook needs discovery.enabled"},
			`{injection: {mode: iptables}}`:                                                                                                      {"injection", "mode"},
			`{injection: {mode: resolv}}`:                                                                                                        {"injection", "nameservers"},
			`{injection: {controlPlane: istiod.istio-system.svc}}`:                                                                               {"injection", "controlPlane"},
			`{injection: {settings: {xds-addr: "istiod:15012"}}}`:                                                                                {"xds-addr"},
			`{injection: {settings: {cache-sise: 8MiB}}}`:                                                                                        {"cache-sise"},
			`{discovery: {settings: {log-levels: debug}}}`:                                                                                       {"log-levels"},
			`{injection: {controlPlane: "a b:15012"}}`:                                                                                           {"injection", "controlPlane"},
			`{injection: {controlPlane: "fd00::1:15012"}}`:                                                                                       {"injection", "controlPlane"},
			`{injection: {controlPlane: "a:1\n"}}`:                                                                                               {"injection", "controlPlane"},
			`{injection: {rootCert: "a\nb"}}`:                                                                                                    {"injection", "rootCert"},
			`{injection: {rootCert: 1}}`:                                                                                                         {"injection", "rootCert"},
			`{injection: {clusterID: "a\nb"}}`:                                                                                                   {"injection", "clusterID"},
			`{injection: {clusterID: 1}}`:                                                                                                        {"injection", "clusterID"},
			`{injection: {clusterDomain: ""}}`:                                                                                                   {"injection", "clusterDomain"},
			`{injection: {clusterDomain: "a\nmode: resolv"}}`:                                                                                    {"injection", "clusterDomain"},
			`{discovery: {priorityClassName: "a b"}}`:                                                                                            {"discovery", "priorityClassName"},
			`{image: {registry: "a #b"}}`:                                                                                                        {"image", "registry"},
			`{image: {agent: {digest: "sha256:12"}}}`:                                                                                            {"image", "digest"},
			`{image: {tag: "1.2@` + digest + `"}}`:                                                                                               {"image.tag is", "set image.tag to the tag alone, and image.agent.digest"},
			`{image: {tag: 1.2}}`:                                                                                                                {"image", "tag"},
			`{injection: {ignoredNamespaces: kube-system}}`:                                                                                      {"injection", "ignoredNamespaces"},
			`{injection: {image: nametap}}`:                                                                                                      {"injection", "image"},
			`{discovery: {settings: {tls-cert: /c}}}`:                                                                                            {"discovery.settings.tls-cert stands beside the Secret that the chart makes: set discovery.tls.secret"},
			`{discovery: {settings: {tls-key: /c}}}`:                                                                                             {"discovery.settings.tls-key stands beside"},
			`{discovery: {tls: {secret: nametap-discovery-cert}}}`:                                                                               {"give your Secret another name"},
			`{discovery: {tls: {secret: own, certManager: true}}}`:                                                                               {"leave one of them out"},
			`{discovery: {tls: {secret: own}}, injection: {webhook: true}}`:                                                                      {"make the Secret with the key ca.crt first, or set injection.caBundle"},
			`{injection: {webhook: true, caBundle: "-----BEGIN CERTIFICATE-----\nMII="}}`:                                                        {"leave one of them out"},
			`{injection: {webhook: true, webhookAnnotations: {cert-manager.io/inject-ca-from: a/b}}}`:                                            {"set both or none"},
			`{discovery: {settings: {cluster-domain: a.example}}}`:                                                                               {"set injection.clusterDomain alone"},
			`{discovery: {settings: {cluster-id: a}}, injection: {clusterID: b}}`:                                                                {"set injection.clusterID alone"},
			`{discovery: {resources: {requests: {memory: 1G}}}}`:                                                                                 {"discovery.resources.requests.memory is 1G, above its limit 512Mi: lower it, or raise discovery.resources.limits.memory"},
			`{discovery: {resources: {requests: {cpu: 1.5}, limits: {cpu: 1400m}}}}`:                                                             {"discovery.resources.requests.cpu is 1.5, above its limit 1400m"},
			`{discovery: {settings: {max-clients: 0}}}`:                                                                                          {"max-clients"},
			`{injection: {resources: {limits: {memory: 16Mi}, requests: {memory: 8Mi}}}}`:                                                        {"injection.resources.limits.memory is 16Mi, and the agent needs 32Mi"},
			`{injection: {resources: {requests: {memory: 1Gi}}}}`:                                                                                {"injection.resources.requests.memory is 1Gi, above its limit 192Mi"},
			`{discovery: {settings: {log-level: loud}}}`:                                                                                         {"log-level"},
			`{injection: {settings: {ttl: 1e6}}}`:                                                                                                {"ttl"},
			`{injection: {mode: resolv, nameservers: [10.96.0.10], settings: {egress: true}}}`:                                                   {"egress"},
			`{injection: {mode: resolv, nameservers: [10.96.0.10], settings: {egress: "true"}}}`:                                                 {"egress"},
			`{injection: {mode: resolv, nameservers: [10.96.0.10], guard: sandbox}}`:                                                             {"guard"},
			`{injection: {nameservers: ["::1"]}}`:                                                                                                {"nameservers"},
			`{injection: {nameservers: [127.0.0.53]}}`:                                                                                           {"nameservers"},
			`{injection: {nameservers: [0.0.0.0]}}`:                                                                                              {"nameservers"},
			`{injection: {nameservers: ["::ffff:127.0.0.1"]}}`:                                                                                   {"nameservers"},
			`{injection: {nameservers: [10.0.0.1, "ff02::fb"]}}`:                                                                                 {"nameservers"},
			`{discovery: {replicas: null}}`:                                                                                                      {"discovery.replicas is null: leave it out to have its default"},
		} {
			_, err := h.template(values)
			if err == nil {
				t.Errorf("%s is accepted", values)
				continue
			}
			for _, part := range parts {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%s: %q is not in: %v", values, part, err)
				}
			}
		}
		all := h.render(`{discovery: {tolerations: [{operator: Exists}, {key: a.example/b, value: c, effect: NoExecute, tolerationSeconds: 0}]}, injection: {mode: resolv, nameservers: [10.96.0.10, "fd00:96::a", "::ffff:10.0.0.1"], settings: {drain: 0, serve-stale: 1.5h, log-level: INFO+4,
			query-log: "off", workload-cert: "off", cache-size: 8388608, egress-mark: "0", xds-plaintext: "true", capture-resolved: false}}}`)
		if cfg := injection(t, all); cfg.Check() != nil || cfg.Settings["cache-size"] != "8388608" || len(cfg.Settings) != 9 {
			t.Errorf("%+v: %v", cfg, cfg.Check())
		}
	})
}

// digest is the digest of an image.
const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// TestImages checks that each image has a name and a digest of its own.
func TestImages(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{image: {registry: "registry.example.com:5000/mesh", agent: {name: team/agent}, init: {digest: "` + digest + `"}, discovery: {name: control-plane}}}`)
		cfg := injection(t, all)
		got := []string{cfg.Image, cfg.InitImage, read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec.Containers[0].Image}
		want := []string{"team/agent:" + version.Release(), "nametap-init:" + version.Release() + "@" + digest, "control-plane:" + version.Release()}
		for i := range want {
			want[i] = "registry.example.com:5000/mesh/" + want[i]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}
