package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/nametap/nametap/internal/testkit/leftout"
)

// removed are objects of earlier charts. Helm removes them after it has replaced what needed them.
var removed = []string{
	"Secret " + namespace + "/nametap-discovery-tls", "ClusterRole /nametap-discovery-webhook", "ClusterRoleBinding /nametap-discovery-webhook",
	"Role " + namespace + "/nametap-discovery", "RoleBinding " + namespace + "/nametap-discovery",
}

// TestUpgrades compares the chart with all earlier charts: fields that the API server does not change are equal,
// and no object gets another name. test/machines/interop upgrades from an earlier one.
func TestUpgrades(t *testing.T) { // P9
	commits, err := exec.CommandContext(t.Context(), "git", "log", "--format=%h", "--", chart).Output()
	if err != nil || len(commits) == 0 {
		leftout.Test(t, "earlier charts: the sources have no history")
	}
	versions(t, func(h helm) {
		t := h.t
		now := h.render(`{injection: {webhook: true}}`)
		for commit := range strings.FieldsSeq(string(commits)) {
			dir := t.TempDir()
			unpack := exec.CommandContext(t.Context(), "sh", "-euc", `git -C ../../.. archive "$1" deploy/chart | tar --extract --directory="$2"`, "sh", commit, dir)
			if output, err := unpack.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, output)
			}
			values := filepath.Join(dir, "values.yaml")
			if err := os.WriteFile(values, []byte(`{injection: {webhook: true}}`), 0o600); err != nil {
				t.Fatal(err)
			}
			stdout, stderr, err := h.run("template", "nametap", filepath.Join(dir, "deploy/chart"), "--namespace", namespace, "--kube-version", "1.36.1", "--values", values)
			if err != nil {
				t.Fatalf("%s: %v\n%s", commit, err, stderr)
			}
			before := parse(t, stdout)
			for key := range before {
				if _, ok := now[key]; !ok {
					if slices.Contains(removed, key) {
						continue
					}
					t.Errorf("%s has %s, and the chart has not", commit, key)
					continue
				}
				switch kind, _, _ := strings.Cut(key, " "); kind {
				case "Deployment":
					if diff := cmp.Diff(read[appsv1.Deployment](t, before, key).Spec.Selector, read[appsv1.Deployment](t, now, key).Spec.Selector); diff != "" {
						t.Errorf("%s: the selector of %s before (-) and now (+):\n%s", commit, key, diff)
					}
				case "RoleBinding", "ClusterRoleBinding":
					if diff := cmp.Diff(read[rbacv1.RoleBinding](t, before, key).RoleRef, read[rbacv1.RoleBinding](t, now, key).RoleRef); diff != "" {
						t.Errorf("%s: the role of %s before (-) and now (+):\n%s", commit, key, diff)
					}
				}
			}
		}
	})
}
