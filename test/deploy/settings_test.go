package deploy

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// proxyConfig is the annotation of Istio's settings.
const proxyConfig = "proxy.istio.io/config"

// environ returns a container's environment like kubelet.
func environ(t *testing.T, pod corev1.Pod, c corev1.Container) []string {
	t.Helper()
	fields := map[string]string{
		"metadata.name": pod.Name, "metadata.namespace": "default",
		"status.podIP": "127.0.0.1", "status.hostIP": "192.0.2.1", "spec.serviceAccountName": "default",
	}
	for key, value := range pod.Annotations {
		fields["metadata.annotations['"+key+"']"] = value
	}
	all := []string{"KUBERNETES_SERVICE_HOST=10.96.0.1"}
	for _, variable := range c.Env {
		value := variable.Value
		if variable.ValueFrom != nil {
			var known bool
			if value, known = fields[variable.ValueFrom.FieldRef.FieldPath]; !known {
				t.Fatalf("%s: there is no field %q", variable.Name, variable.ValueFrom.FieldRef.FieldPath)
			}
		}
		all = append(all, variable.Name+"="+value)
	}
	return all
}

// TestSettings checks that the commands accept the settings and the arguments of all files, and switch capture by them.
func TestSettings(t *testing.T) { // I0, K15
	t.Parallel()
	accepted := func(environ []string, args ...string) string {
		t.Helper()
		// Every command reads all settings; this one changes nothing.
		return output(t, command(t, environ, "nametap", append([]string{"capture", "print"}, args...)...))
	}
	help := output(t, command(t, nil, "nametap", "agent", "--help"))
	for _, variant := range []string{"istiod", "discovery"} {
		pod := load[corev1.Pod](t, variant, "Pod")
		for _, c := range pod.Spec.InitContainers {
			output(t, command(t, nil, "nametap", append(c.Args, "--help")...))
			accepted(environ(t, pod, c))
		}
		for _, m := range pod.Spec.InitContainers[0].VolumeMounts {
			if !strings.Contains(help, m.MountPath) {
				t.Errorf("%s: %s is no default of the agent", variant, m.MountPath)
			}
		}
	}
	var settings []string
	for _, match := range regexp.MustCompile(`(?m)^#?([A-Z_]+=.*)$`).FindAllStringSubmatch(read(t, "systemd/nametap.default"), -1) {
		settings = append(settings, match[1])
		name, _, _ := strings.Cut(match[1], "=")
		flag, ours := strings.CutPrefix(name, "NAMETAP_")
		flag = "--" + strings.ToLower(strings.ReplaceAll(flag, "_", "-")) + " "
		if ours && !strings.Contains(help, flag) || !ours && !strings.Contains(help, "["+name+"]") {
			t.Errorf("%s is not a setting of the agent", name)
		}
	}
	if accepted(settings); len(settings) < 10 {
		t.Errorf("the file has only the settings %q", settings)
	}
	for _, name := range services {
		commands := regexp.MustCompile(`(?m)^Exec\w+=.*/usr/local/bin/nametap (.*)$`).FindAllStringSubmatch(read(t, "systemd/"+name), -1)
		if len(commands) == 0 {
			t.Errorf("%s runs no command", name)
		}
		for _, c := range commands {
			output(t, command(t, nil, "nametap", append(strings.Fields(c[1]), "--help")...))
		}
	}

	on := []string{"--mesh-config", "deploy/mesh-config/on.yaml"}
	if rules := accepted(nil, on...); !strings.Contains(rules, "192.0.2.0/24") {
		t.Errorf("the exclusion is not in the rules:\n%s", rules)
	}
	var patch corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(read(t, "mesh-config/annotation.yaml")), &patch); err != nil {
		t.Fatal(err)
	}
	apply := []string{"capture", "apply"}
	for want, text := range map[string]string{
		"(mesh config":  output(t, command(t, nil, "nametap", append(apply, "--mesh-config", "deploy/mesh-config/off.yaml")...)),
		"(PROXY_CONFIG": output(t, command(t, []string{"PROXY_CONFIG=" + patch.Annotations[proxyConfig]}, "nametap", append(apply, on...)...)),
	} {
		if want = "no rules installed: ISTIO_META_DNS_CAPTURE=false " + want; !strings.Contains(text, want) {
			t.Errorf("%q does not contain %q", text, want)
		}
	}
}

// TestDiscoverySettings checks that nametap-discovery accepts the arguments of its Deployment and serves the Kubernetes
// API.
func TestDiscoverySettings(t *testing.T) {
	t.Parallel()
	table := func(args ...string) string {
		t.Helper()
		return output(t, command(t, nil, "nametap-discovery", append([]string{"table"}, args...)...))
	}
	spec := load[appsv1.Deployment](t, "discovery", "Deployment").Spec.Template.Spec
	a := fakekube.Start(t)
	a.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: default}\nspec: {clusterIP: 10.96.0.1}\n")
	if got := table(append(slices.Clone(spec.Containers[0].Args), "--kubeconfig="+a.Kubeconfig())...); !strings.Contains(got, "web.default.svc.cluster.local") {
		t.Errorf("no web in %s", got)
	}
}
