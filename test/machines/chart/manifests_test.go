package chart

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the manifests in deploy/kubernetes")

// The parts of deploy/kubernetes that are not in the chart.
const (
	discoveryHead = `# nametap-discovery in two replicas, which serve the Services, ServiceEntries and Sidecars of the
# cluster, and a pod that gets the mesh's DNS from them. docs/discovery.md explains the first part,
# istiod.yaml the pod. ` + "`make generate`" + ` writes this file from deploy/chart and istiod.yaml.
#
#     kubectl create -f crds.yaml # for ServiceEntries and Sidecars in a cluster without Istio
#     kubectl apply -f discovery.yaml
#     nametap-discovery certificates --pods-in default | kubectl apply --server-side -f -
#     kubectl create service clusterip web --tcp=80
#     kubectl exec shop -c nametap -- nametap query web
apiVersion: v1
kind: Namespace
metadata:
  name: nametap-system
  labels: {pod-security.kubernetes.io/enforce: restricted}
`
	webhookHead = `# Lets the API server ask nametap-discovery about pods that are created, so that they get the agent
# (Kubernetes 1.29 or later). docs/injection.md explains it. ` + "`make generate`" + ` writes this file from deploy/chart.
#
#     kubectl apply -f discovery.yaml -f webhook.yaml
#     nametap-discovery certificates --webhook | kubectl apply --server-side -f -
#     kubectl label namespace shop nametap.dev/inject=enabled
#
# The second command writes the field caBundle, which therefore is not here.
#
`
)

// TestManifests checks that deploy/kubernetes has the objects of the chart with its defaults, without the labels of
// Helm. With -update it writes them.
func TestManifests(t *testing.T) { // P10
	versions(t, func(h helm) {
		t := h.t
		stdout, stderr, err := h.run("template", "nametap", chart, "--namespace", namespace, "--kube-version", "1.36.1", "--set", "injection.webhook=true")
		if err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		discovery := append([]string{discoveryHead}, documents(t, stdout, "discovery")...)
		discovery = append(append(discovery, documents(t, stdout, "injection")...), example(t))
		for name, text := range map[string]string{
			"crds":      file(t, chart, "crds/crds.yaml"),
			"discovery": strings.Join(discovery, "---\n"),
			"webhook":   webhookHead + strings.Join(documents(t, stdout, "webhook"), "---\n"),
		} {
			if *update {
				if err := os.WriteFile(filepath.Join(manifests, name+".yaml"), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(text, file(t, manifests, name+".yaml")); diff != "" {
				t.Errorf("deploy/kubernetes/%s.yaml is not current: run `make generate` (-chart +file):\n%s", name, diff)
			}
		}
	})
}

// file returns the text of a file.
func file(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var kinds = regexp.MustCompile(`(?m)^kind: (\w+)$`)

// documents returns the objects of a template as a person would write them. They are in the order of the template;
// Helm sorts them by their kinds.
func documents(t *testing.T, rendered, template string) []string {
	t.Helper()
	byKind := map[string][]string{}
	for document := range strings.SplitSeq(rendered, "---\n") {
		if text, ok := strings.CutPrefix(document, "# Source: nametap/templates/"+template+".yaml\n"); ok {
			kind := kinds.FindStringSubmatch(text)[1]
			byKind[kind] = append(byKind[kind], handwritten(t, text))
		}
	}
	var ordered []string
	for _, kind := range kinds.FindAllStringSubmatch(file(t, chart, "templates/"+template+".yaml"), -1) {
		if of := byKind[kind[1]]; len(of) > 0 {
			ordered, byKind[kind[1]] = append(ordered, of[0]), of[1:]
		}
	}
	return ordered
}

var (
	helmLabels   = regexp.MustCompile(`(,|\n *) ?labels: \{"app\.kubernetes\.io/[^}]*\}`)
	helmPodLabel = regexp.MustCompile(`\n *app\.kubernetes\.io/.*`)
	quotedNames  = regexp.MustCompile(`"([a-z]+(?:-[a-z]+)+)"`)
	commas       = regexp.MustCompile(`([a-z]),([a-z])`) // in lists that were JSON
	quotedFields = regexp.MustCompile(`\b(image|imagePullPolicy|controlPlane): "([^"]+)"`)
)

// handwritten returns an object without the labels of Helm and needless quotes, and with the comments of its values.
func handwritten(t *testing.T, text string) string {
	t.Helper()
	if n := len(helmLabels.FindAllString(text, -1)); n != 1 {
		t.Errorf("an object has %d times the labels of Helm:\n%s", n, text)
	}
	text = helmPodLabel.ReplaceAllString(helmLabels.ReplaceAllString(text, ""), "")
	text = quotedFields.ReplaceAllString(quotedNames.ReplaceAllString(text, "$1"), "$1: $2")
	text = commas.ReplaceAllString(text, "$1, $2")
	lines := strings.SplitAfter(strings.TrimRight(text, "\n")+"\n", "\n")
	for _, key := range []string{"topologySpreadConstraints", "resources"} {
		if start := slices.IndexFunc(lines, func(line string) bool { return strings.TrimSpace(line) == key+":" }); start >= 0 {
			indent := strings.Repeat(" ", indentation(lines[start]))
			lines = slices.Replace(lines, start, end(lines, start), value(t, key, indent)...)
		}
	}
	return strings.Join(lines, "")
}

// value returns the lines of a value of nametap-discovery in values.yaml with their comments.
func value(t *testing.T, key, indent string) []string {
	t.Helper()
	lines := strings.SplitAfter(file(t, chart, "values.yaml"), "\n")
	start := slices.Index(lines, "  "+key+":\n")
	if start < 0 {
		t.Fatalf("values.yaml has no %s", key)
	}
	first := start
	for strings.HasPrefix(lines[first-1], "  # ") {
		first--
	}
	found := slices.Clone(lines[first:end(lines, start)])
	for i, line := range found {
		found[i] = indent + strings.TrimPrefix(line, "  ")
	}
	return found
}

// end returns the index of the line behind the value that starts at a line.
func end(lines []string, start int) int {
	for i := start + 1; i < len(lines); i++ {
		if indentation(lines[i]) <= indentation(lines[start]) {
			return i
		}
	}
	return len(lines)
}

func indentation(line string) int { return len(line) - len(strings.TrimLeft(line, " ")) }

var comments = regexp.MustCompile(`(?m)^ *#.*\n| #.*$`)

// example returns the pod of istiod.yaml with the control plane nametap-discovery, without the comments.
func example(t *testing.T) string {
	t.Helper()
	return strings.NewReplacer(
		"istiod.istio-system.svc", "nametap-discovery."+namespace+".svc", "istio-ca-root-cert", "nametap-ca-root-cert",
	).Replace(comments.ReplaceAllString(file(t, manifests, "istiod.yaml"), ""))
}
