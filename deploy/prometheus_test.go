package deploy

import (
	"cmp"
	"encoding/json"
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// An alert is a rule of prometheus/rules.yaml.
type alert struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

// alerts returns the rules of prometheus/rules.yaml.
func alerts(t *testing.T) []alert {
	t.Helper()
	var file struct {
		Groups []struct {
			Name, Interval string
			Rules          []alert
		}
	}
	if err := yaml.UnmarshalStrict([]byte(read(t, "prometheus/rules.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Groups) != 2 {
		t.Fatalf("groups %+v", file.Groups)
	}
	return slices.Concat(file.Groups[0].Rules, file.Groups[1].Rules)
}

// panels returns the expressions of the dashboard by the title of their panel, and its other queries.
func panels(t *testing.T) map[string][]string {
	t.Helper()
	var board struct {
		Panels []struct {
			Title, Type string
			Targets     []struct{ Expr string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, "prometheus/dashboard.json")), &board); err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for _, p := range board.Panels {
		if p.Type == "row" {
			continue
		}
		if len(p.Targets) == 0 || all[p.Title] != nil {
			t.Errorf("panel %q has no expression, or another one's title", p.Title)
		}
		for _, target := range p.Targets {
			all[p.Title] = append(all[p.Title], target.Expr)
		}
	}
	for _, v := range board.Templating.List {
		if v.Definition != "" {
			all["$"+v.Name] = []string{v.Definition}
		}
	}
	return all
}

// R4: every metric in the alerts, in the dashboard and in the documents is one that the source names. The suffixes of a
// histogram's buckets and sums are left out.
func TestPrometheusMetrics(t *testing.T) {
	t.Parallel()
	declared := map[string]bool{"up": true, "process_resident_memory_bytes": true, "process_cpu_seconds_total": true}
	literal := regexp.MustCompile(`"(\w+)"`)
	if err := filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			for _, match := range literal.FindAllStringSubmatch(read(t, path), -1) {
				for _, prefix := range []string{"", "nametap_discovery_", "nametap_discovery_resource_"} {
					declared[prefix+match[1]] = true
				}
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile("`(nametap_\\w+)`").FindAllStringSubmatch(read(t, "../docs/metrics.md")+read(t, "../docs/discovery-reference.md"), -1) {
		if !declared[match[1]] {
			t.Errorf("the documents name %s, which is no metric", match[1])
		}
	}
	expressions := panels(t)
	for _, a := range alerts(t) {
		expressions[a.Alert] = []string{a.Expr}
	}
	text := regexp.MustCompile(`"[^"]*"`)
	name := regexp.MustCompile(`\b(?:up|(?:nametap|istio|process|go)_\w+)\b`)
	for where, list := range expressions {
		for _, expression := range list {
			found := name.FindAllString(text.ReplaceAllString(expression, ""), -1)
			if len(found) == 0 {
				t.Errorf("%s: no metric in %s", where, expression)
			}
			for _, metric := range found {
				if base := regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(metric, ""); !declared[metric] && !declared[base] {
					t.Errorf("%s: no source declares %s", where, metric)
				}
				if strings.HasSuffix(metric, "_total") && !strings.Contains(expression, "rate(") && !strings.Contains(expression, "increase(") {
					t.Errorf("%s: %s is a counter, and its value is used", where, metric)
				}
			}
		}
	}
}

// R4, R15: each code of a problem that an agent finds has one alert, which docs/problems.md names. NametapProblem has the
// codes without an alert of their own.
func TestAlertOfProblem(t *testing.T) {
	t.Parallel()
	documented := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\|.*\\| (\\w+|-) \\|$").FindAllStringSubmatch(read(t, "../docs/problems.md"), -1) {
		documented[row[1]] = row[2]
	}
	owners := map[string]string{
		// Alerts with other metrics, which are about these problems, too.
		"table_absent": "NametapNoTable", "queries_fail": "NametapQueriesFail", "overflow": "NametapQueriesFail",
	}
	var others []string
	for _, a := range alerts(t) {
		for _, match := range regexp.MustCompile(`\bcode(=~|=|!~)"([^"]+)"`).FindAllStringSubmatch(a.Expr, -1) {
			for code := range strings.SplitSeq(match[2], "|") {
				if documented[code] == "" {
					t.Errorf("%s: there is no problem %s", a.Alert, code)
				}
				switch {
				case match[1] == "!~":
					others = append(others, code)
				case owners[code] != "":
					t.Errorf("%s is in %s and in %s", code, owners[code], a.Alert)
				default:
					owners[code] = a.Alert
				}
			}
		}
	}
	for code, alert := range documented {
		if owner := cmp.Or(owners[code], "NametapProblem"); alert != "-" && alert != owner {
			t.Errorf("docs/problems.md: %s has the alert %s, want %s", code, alert, owner)
		}
	}
	slices.Sort(others)
	if want := slices.Sorted(maps.Keys(owners)); !slices.Equal(others, want) {
		t.Errorf("NametapProblem leaves out %q, and other alerts are about %q", others, want)
	}
}
