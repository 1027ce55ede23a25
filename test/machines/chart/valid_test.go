package chart

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// A world has the objects of the chart by their types.
type world struct {
	all      objects
	problems []string

	configMaps map[string]corev1.ConfigMap
	accounts   map[string]corev1.ServiceAccount
	services   map[string]corev1.Service
	roles      map[string]bool
	pod        corev1.PodTemplateSpec
}

// check returns what the API server would refuse, and what refers to something that is not there.
func check(all objects) []string {
	w := &world{all: all, configMaps: map[string]corev1.ConfigMap{}, accounts: map[string]corev1.ServiceAccount{}, services: map[string]corev1.Service{}, roles: map[string]bool{}}
	for _, step := range []func(key, kind string){w.decode, w.refer} {
		for _, key := range slices.Sorted(maps.Keys(all)) {
			kind, _, _ := strings.Cut(key, " ")
			step(key, kind)
		}
	}
	return w.problems
}

func (w *world) problem(key, format string, args ...any) {
	w.problems = append(w.problems, key+": "+fmt.Sprintf(format, args...))
}

// strict decodes an object strictly.
func strict[T any](w *world, key string) T {
	var typed T
	text, err := json.Marshal(w.all[key])
	if err == nil {
		err = kyaml.UnmarshalStrict(text, &typed)
	}
	if err != nil {
		w.problem(key, "%v", err)
	}
	return typed
}

// decode decodes an object, and keeps objects that others refer to.
func (w *world) decode(key, kind string) {
	var meta struct{ Metadata metav1.ObjectMeta }
	text, err := json.Marshal(w.all[key])
	if err == nil {
		err = json.Unmarshal(text, &meta)
	}
	if err != nil {
		w.problem(key, "%v", err)
	}
	w.names(key, meta.Metadata)
	switch kind {
	case "ConfigMap":
		w.configMaps[meta.Metadata.Name] = strict[corev1.ConfigMap](w, key)
	case "ServiceAccount":
		w.accounts[meta.Metadata.Name] = strict[corev1.ServiceAccount](w, key)
	case "Service":
		w.services[meta.Metadata.Name] = strict[corev1.Service](w, key)
	case "Role", "ClusterRole":
		w.roles[kind+" "+meta.Metadata.Namespace+"/"+meta.Metadata.Name] = true
		for _, rule := range strict[rbacv1.Role](w, key).Rules {
			if len(rule.Verbs) == 0 || len(rule.Resources) == 0 || slices.Contains(rule.ResourceNames, "") {
				w.problem(key, "rule %+v", rule)
			}
		}
	case "Deployment":
		d := strict[appsv1.Deployment](w, key)
		w.pod = d.Spec.Template
		w.names(key, w.pod.ObjectMeta)
		if len(d.Spec.Selector.MatchLabels) != 1 {
			w.problem(key, "the selector %v of earlier charts was another one", d.Spec.Selector)
		}
		w.selects(key, d.Spec.Selector, w.pod.Labels)
	case "CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "RoleBinding", "ClusterRoleBinding", "NetworkPolicy", "PodDisruptionBudget", "MutatingWebhookConfiguration",
		"Certificate", "Issuer": // of cert-manager
	default:
		w.problem(key, "another kind")
	}
}

// names checks the names, labels and annotations of an object.
func (w *world) names(key string, meta metav1.ObjectMeta) {
	errs := metavalidation.ValidateLabels(meta.Labels, field.NewPath("labels"))
	for name := range meta.Annotations {
		for _, message := range validation.IsQualifiedName(strings.ToLower(name)) {
			w.problem(key, "annotation %q: %s", name, message)
		}
	}
	for _, err := range errs {
		w.problem(key, "%v", err)
	}
	if meta.Name != "" && len(validation.IsDNS1123Subdomain(meta.Name)) > 0 {
		w.problem(key, "name %q", meta.Name)
	}
}

// selects checks that a selector selects an object with labels.
func (w *world) selects(key string, selector *metav1.LabelSelector, labels map[string]string) {
	parsed, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil || parsed.Empty() {
		w.problem(key, "selector %v: %v", selector, err)
		return
	}
	for name, value := range selector.MatchLabels {
		if labels[name] != value {
			w.problem(key, "selects %s=%s, not %v", name, value, labels)
		}
	}
}

// refer checks what an object refers to.
func (w *world) refer(key, kind string) {
	switch kind {
	case "ConfigMap":
		cfg, err := inject.ParseConfig([]byte(w.configMaps["nametap-inject"].Data["inject.yaml"]))
		if err == nil {
			err = cfg.Check()
		}
		if err != nil {
			w.problem(key, "%v", err)
		}
	case "RoleBinding", "ClusterRoleBinding":
		b := strict[rbacv1.RoleBinding](w, key)
		if !w.roles[b.RoleRef.Kind+" "+b.Namespace+"/"+b.RoleRef.Name] {
			w.problem(key, "no role %v", b.RoleRef)
		}
		for _, subject := range b.Subjects {
			if subject.Name != w.pod.Spec.ServiceAccountName || subject.Namespace != namespace {
				w.problem(key, "subject %v, and the pods have the account %s", subject, w.pod.Spec.ServiceAccountName)
			}
		}
	case "Deployment":
		w.podSpec(key, w.pod.Spec)
	case "Service":
		s := w.services["nametap-discovery"]
		w.selects(key, &metav1.LabelSelector{MatchLabels: s.Spec.Selector}, w.pod.Labels)
		for _, port := range s.Spec.Ports {
			w.port(key, port.TargetPort.StrVal)
		}
	case "PodDisruptionBudget":
		w.selects(key, strict[policyv1.PodDisruptionBudget](w, key).Spec.Selector, w.pod.Labels)
	case "NetworkPolicy":
		policy := strict[networkingv1.NetworkPolicy](w, key)
		w.selects(key, &policy.Spec.PodSelector, w.pod.Labels)
		for _, rule := range policy.Spec.Ingress {
			for _, port := range rule.Ports {
				w.port(key, port.Port.StrVal)
			}
			if len(rule.Ports) == 0 {
				w.problem(key, "all ports")
			}
		}
	case "MutatingWebhookConfiguration":
		for _, hook := range strict[admissionv1.MutatingWebhookConfiguration](w, key).Webhooks {
			s, ok := w.services[hook.ClientConfig.Service.Name]
			if !ok || !slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == *hook.ClientConfig.Service.Port }) {
				w.problem(key, "no Service %v", hook.ClientConfig.Service)
			}
		}
	}
}

// port checks that the container has a port.
func (w *world) port(key, name string) {
	if !slices.ContainsFunc(w.pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool { return p.Name == name }) {
		w.problem(key, "no port %q", name)
	}
}

// podSpec checks the volumes, mounts, images and account of the pods.
func (w *world) podSpec(key string, spec corev1.PodSpec) {
	volumes, paths := map[string]bool{}, map[string]bool{}
	for _, v := range spec.Volumes {
		if volumes[v.Name] {
			w.problem(key, "volume %s twice", v.Name)
		}
		volumes[v.Name] = true
		if v.ConfigMap != nil {
			if _, ok := w.configMaps[v.ConfigMap.Name]; !ok {
				w.problem(key, "no ConfigMap %s", v.ConfigMap.Name)
			}
		}
	}
	c := spec.Containers[0]
	for _, m := range c.VolumeMounts {
		if !volumes[m.Name] || paths[m.MountPath] {
			w.problem(key, "mount %v", m)
		}
		paths[m.MountPath] = true
	}
	if c.Image == "" || strings.Count(c.Image, "@") > 1 || strings.ContainsAny(c.Image, " \n") {
		w.problem(key, "image %q", c.Image)
	}
	for name, request := range c.Resources.Requests {
		if limit, ok := c.Resources.Limits[name]; ok && request.Cmp(limit) > 0 {
			w.problem(key, "requests %v of %s, at most %v", request, name, limit)
		}
	}
	_, made := w.accounts[spec.ServiceAccountName]
	if !made && (len(w.accounts) > 0 || spec.ServiceAccountName == "") {
		w.problem(key, "no account %s", spec.ServiceAccountName)
	}
	flags := map[string]bool{}
	for _, arg := range c.Args {
		name, _, _ := strings.Cut(arg, "=")
		if flags[name] {
			w.problem(key, "%s twice", name)
		}
		flags[name] = true
	}
}
