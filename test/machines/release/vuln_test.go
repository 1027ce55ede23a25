package release_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// vulnerable is an invented entry of a vulnerability database, for a module that both programs
// link.
const vulnerable = `{"schema_version": "1.3.1", "id": "GO-2000-0001", "modified": "2000-01-01T00:00:00Z", "published": "2000-01-01T00:00:00Z",
"summary": "an invented vulnerability", "details": "an invented vulnerability",
"affected": [{"package": {"name": "github.com/spf13/pflag", "ecosystem": "Go"},
"ranges": [{"type": "SEMVER", "events": [{"introduced": "0"}]}],
"ecosystem_specific": {"imports": [{"path": "github.com/spf13/pflag", "symbols": ["FlagSet.Parse"]}]}}]}`

// TestVuln checks that `make vuln` passes with a database without an entry, and fails with an
// entry for code that the programs reach, and without a database. P11.
func TestVuln(t *testing.T) {
	database := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(database, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	vuln := func(database string) (string, error) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "make", "--silent", "--directory="+root, "vuln")
		cmd.Env = append(os.Environ(), "GOVULNDB=file://"+database)
		text, err := cmd.CombinedOutput()
		return string(text), err
	}
	const modified = `"modified": "2000-01-01T00:00:00Z"`
	write("index/db.json", "{"+modified+"}")
	write("index/modules.json", "[]")
	if said, err := vuln(database); err != nil {
		t.Errorf("without an entry: %v\n%s", err, said)
	}
	write("index/modules.json", `[{"path": "github.com/spf13/pflag", "vulns": [{"id": "GO-2000-0001", `+modified+`}]}]`)
	write("ID/GO-2000-0001.json", vulnerable)
	if said, err := vuln(database); err == nil || !strings.Contains(said, "GO-2000-0001") {
		t.Errorf("with an entry: %v\n%s", err, said)
	}
	if said, err := vuln(filepath.Join(database, "missing")); err == nil || !strings.Contains(said, "nothing was checked") {
		t.Errorf("without a database: %v\n%s", err, said)
	}
}
