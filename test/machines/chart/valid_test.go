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
	kyaml "sigs.k8s.io/yaml"
)

// types are the types of Kubernetes by their kinds.
func types() map[string]any {
	return map[string]any{
		"ConfigMap": &corev1.ConfigMap{}, "ServiceAccount": &corev1.ServiceAccount{}, "Service": &corev1.Service{}, "Deployment": &appsv1.Deployment{},
		"Role": &rbacv1.Role{}, "ClusterRole": &rbacv1.ClusterRole{}, "RoleBinding": &rbacv1.RoleBinding{}, "ClusterRoleBinding": &rbacv1.ClusterRoleBinding{},
		"NetworkPolicy": &networkingv1.NetworkPolicy{}, "PodDisruptionBudget": &policyv1.PodDisruptionBudget{},
		"MutatingWebhookConfiguration": &admissionv1.MutatingWebhookConfiguration{},
	}
}

// others are kinds of custom resources.
var others = []string{"CustomResourceDefinition", "PodMonitor", "ServiceMonitor", "Certificate", "Issuer"}

// check returns the fields that the types of Kubernetes do not have, and what the pods mount and do not have. The tests of
// interop install the chart in a cluster.
func check(all objects) (problems []string) {
	problem := func(key, format string, args ...any) {
		problems = append(problems, key+": "+fmt.Sprintf(format, args...))
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		kind, _, _ := strings.Cut(key, " ")
		typed := types()[kind]
		if typed == nil {
			if !slices.Contains(others, kind) {
				problem(key, "another kind")
			}
			continue
		}
		text, err := json.Marshal(all[key])
		if err == nil {
			err = kyaml.UnmarshalStrict(text, typed)
		}
		if err != nil {
			problem(key, "%v", err)
		}
		d, ok := typed.(*appsv1.Deployment)
		if !ok {
			continue
		}
		volumes := map[string]bool{}
		for _, v := range d.Spec.Template.Spec.Volumes {
			volumes[v.Name] = true
		}
		for _, m := range d.Spec.Template.Spec.Containers[0].VolumeMounts {
			if !volumes[m.Name] {
				problem(key, "mounts %s, which is no volume", m.Name)
			}
		}
	}
	return problems
}
