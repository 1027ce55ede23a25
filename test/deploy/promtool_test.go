package deploy

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// TestPromtool checks that Prometheus accepts the alerts and the expressions of the dashboard, and that the alerts fire
// and end as their tests say.
func TestPromtool(t *testing.T) { // R4
	t.Parallel()
	netns.Need(t, "promtool")
	check := func(args ...string) { t.Helper(); output(t, command(t, nil, "promtool", args...)) }
	check("check", "rules", "deploy/prometheus/rules.yaml")
	check("test", "rules", "deploy/prometheus/rules_test.yaml")
	var rules strings.Builder
	rules.WriteString("groups:\n- name: board\n  rules:\n")
	for i, expression := range regexp.MustCompile(`"expr": ("(?:[^"\\]|\\.)*")`).FindAllStringSubmatch(read(t, "prometheus/dashboard.json"), -1) {
		var text string
		if err := json.Unmarshal([]byte(expression[1]), &text); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&rules, "  - {record: 'board:%d', expr: %q}\n", i, strings.ReplaceAll(text, "$__rate_interval", "5m"))
	}
	path := filepath.Join(t.TempDir(), "board.yaml")
	write(t, path, rules.String())
	check("check", "rules", path)
}
