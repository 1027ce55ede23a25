package chart

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/inject"
)

// TestRootCert checks that pods trust the root certificate of their control plane:
// nametap-discovery's, istiod's, or one that has to be named.
func TestRootCert(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		for values, want := range map[string]string{
			`{injection: {controlPlane: "istiod.istio-system.svc:15012"}}`:                                                           "istio-ca-root-cert",
			`{injection: {controlPlane: "istiod-1-30-0.istio-system.svc:15012"}}`:                                                    "istio-ca-root-cert",
			`{discovery: {enabled: false}}`:                                                                                          "istio-ca-root-cert",
			`{injection: {controlPlane: "nametap-discovery.nametap-system.svc:15012", rootCert: own}}`:                               "own",
			`{injection: {controlPlane: "mesh.example.com:15012", rootCert: own}}`:                                                   "own",
			`{injection: {controlPlane: "[fd00::1]:15012", rootCert: nametap-ca-root-cert}}`:                                         "nametap-ca-root-cert",
			`{injection: {controlPlane: "istiod.istio-system.svc:15012", rootCert: nametap-ca-root-cert}, discovery: {replicas: 1}}`: "nametap-ca-root-cert",
		} {
			if got := injection(t, h.render(values)).RootCert; got != want {
				t.Errorf("%s: %s, want %s", values, got, want)
			}
		}
		for _, controlPlane := range []string{"mesh.example.com:15012", "192.0.2.1:15012", "[fd00::1]:15012", "istiodx.example.com:15012", "xds:15012", "nametap-discovery.mesh.svc:15012"} {
			if _, err := h.template(fmt.Sprintf(`{injection: {controlPlane: %q}}`, controlPlane)); err == nil || !strings.Contains(err.Error(), "set injection.rootCert") {
				t.Errorf("%s: %v", controlPlane, err)
			}
		}
	})
}

// TestTexts checks that texts which YAML reads as something else stay texts.
func TestTexts(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		text := "a: b # c, {d} [e] & 'f' \"g\" \\ ${h} <i>\nj: {{ k }}\n"
		quoted, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		all := h.render(`{image: {registry: "[fd00::1]:5000/mesh", tag: "1.0", pullPolicy: Always, pullSecrets: ["1", "true", "1e3"]}, discovery: {
			replicas: 1000000, priorityClassName: "123", podLabels: {"1": "2"}, podAnnotations: {text: ` + string(quoted) + `, "null": "null"},
			nodeSelector: {"yes": "on"}, settings: {trust-domain: ` + string(quoted) + `, max-clients: 100000000}},
			injection: {mode: resolv, controlPlane: "[fd00::1]:15012", rootCert: "0123", clusterID: "#1: 'a\"b", clusterDomain: "1.5", nameservers: ["fd00::1", "fd00::"],
			settings: {bypass: ` + string(quoted) + `, egress-mark: 0, pod-name: "0x10", capture-fail-open: false}, ignoredNamespaces: ["123", "null", "1e3"]}}`)
		cfg := injection(t, all)
		want := inject.DefaultConfig()
		want.Mode, want.ImagePullPolicy = inject.Resolv, "Always"
		want.Image, want.InitImage = "[fd00::1]:5000/mesh/nametap:1.0", "[fd00::1]:5000/mesh/nametap-init:1.0"
		want.ControlPlane, want.RootCert, want.ClusterID, want.ClusterDomain = "[fd00::1]:15012", "0123", `#1: 'a"b`, "1.5"
		want.Nameservers = []string{"fd00::1", "fd00::"}
		want.Settings = map[string]string{"bypass": text, "egress-mark": "0", "pod-name": "0x10", "capture-fail-open": "false"}
		want.IgnoredNamespaces = []string{"123", "null", "1e3", namespace}
		if diff := cmp.Diff(want, cfg); diff != "" {
			t.Errorf("injection:\n%s", diff)
		}
		d := read[appsv1.Deployment](t, all, deployment)
		pod := d.Spec.Template
		if got := *d.Spec.Replicas; got != 1000000 {
			t.Errorf("%d replicas", got)
		}
		if pod.Spec.PriorityClassName != "123" || pod.Labels["1"] != "2" || pod.Annotations["text"] != text || pod.Annotations["null"] != "null" || pod.Spec.NodeSelector["yes"] != "on" {
			t.Errorf("%+v", pod)
		}
		if diff := cmp.Diff([]corev1.LocalObjectReference{{Name: "1"}, {Name: "true"}, {Name: "1e3"}}, pod.Spec.ImagePullSecrets); diff != "" {
			t.Error(diff)
		}
		if args := pod.Spec.Containers[0].Args; !slices.Contains(args, "--trust-domain="+text) || !slices.Contains(args, "--max-clients=100000000") {
			t.Errorf("%q", args)
		}
		if image := pod.Spec.Containers[0].Image; image != "[fd00::1]:5000/mesh/nametap-discovery:1.0" {
			t.Error(image)
		}
	})
}
