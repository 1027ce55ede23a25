package statedir_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/statedir"
)

// TestSave checks that a value is read as it was saved, and that a file that cannot be trusted is named, and moved
// aside by Load.
func TestSave(t *testing.T) { // D18
	t.Parallel()
	dir := statedir.New(t.TempDir(), "lock")
	defer dir.Unlock()
	var got []string
	decode := func(data json.RawMessage) error { return json.Unmarshal(data, &got) }
	if err := dir.Load("a.json", "list/1", decode); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
	if err := dir.Save("a.json", "list/1", []string{"a", "<b>"}); err != nil {
		t.Fatal(err)
	}
	if err := dir.Load("a.json", "list/1", decode); err != nil || strings.Join(got, " ") != "a <b>" {
		t.Fatalf("%q, %v", got, err)
	}
	text, err := os.ReadFile(dir.File("a.json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, damaged := range map[string]string{
		"cut": string(text[:len(text)/2]), "empty": "", "edited": strings.Replace(string(text), `"a"`, `"c"`, 1),
		"another format": strings.Replace(string(text), "list/1", "list/2", 1), "no data": `{"format": "list/1"}`,
	} {
		if err := os.WriteFile(dir.File("a.json"), []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := dir.Load("a.json", "list/1", decode); !errors.Is(err, statedir.ErrDamaged) || !strings.Contains(err.Error(), dir.File("a.json")) {
			t.Errorf("%s: %v", name, err)
		}
		if aside, err := os.ReadFile(dir.File("a.json") + ".damaged"); err != nil || string(aside) != damaged {
			t.Errorf("%s: set aside %q, %v", name, aside, err)
		}
	}
}
