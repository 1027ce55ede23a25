package settings_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/settings"
)

// K22: files of EnvironmentFile= have the meaning that systemd gives them.
func TestParseEnvironmentFile(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                               nil,
		"A=b\nC=d":                       {"A=b", "C=d"},
		"# A=b\n; C=d\n  # E=f\nG=h\n":   {"G=h"},
		" A = b c \t\nC=\n":              {"A=b c", "C="},
		"no equals sign\nA=b":            {"A=b"},
		"export A=b\n=c\n":               {"export A=b"},
		`A="b c"  ` + "\n":               {"A=b c"},
		`A='b "c" \n'`:                   {`A=b "c" \n`},
		`A="b \"c\" \\ \$d \e"`:          {`A=b "c" \ $d \e`},
		"A=b\\\nc\\d \nD=e":              {"A=bcd", "D=e"},
		"A=\"b\nc\"\nD='e\nf'":           {"A=b\nc", "D=e\nf"},
		"A=b'c'd\n":                      {"A=b'c'd"},
		`A="b"'c'd e`:                    {"A=bcd e"},
		"A=b # no comment\r\nC=d\r\n":    {"A=b # no comment", "C=d"},
		"A=$HOME ${HOME}":                {"A=$HOME ${HOME}"},
		"# continued \\\nA=b\n":          {"A=b"},
		`A='b' "c"'d'`:                   {"A=bcd"},
		`A="open`:                        {"A=open"},
		"A='":                            {"A="},
		"A=1\nA=2":                       {"A=1", "A=2"},
		"A=\"joined \\\nline\"":          {"A=joined line"},
		"PROXY_CONFIG='{\"a\":\"b c\"}'": {`PROXY_CONFIG={"a":"b c"}`},
	} {
		if diff := cmp.Diff(want, settings.ParseEnvironmentFile(text)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", text, diff)
		}
	}
}

// K22: the property Environment, as systemctl prints it.
func TestParseEnvironment(t *testing.T) {
	t.Parallel()
	want := []string{"A=b", `C=d "e" $f`, "G="}
	if diff := cmp.Diff(want, settings.ParseEnvironment(`A=b "C=d \"e\" \$f"  G=`)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A value in double quotes is read as it was, whatever stands before it.
func FuzzParseEnvironmentFile(f *testing.F) {
	for _, text := range []string{"", "A=b", "# c\nA='b", "A=\"b\\", "A=b\\\nc", "=\n\r;", "A=\\"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, variable := range settings.ParseEnvironmentFile(text) {
			key, _, found := strings.Cut(variable, "=")
			if !found || key == "" || strings.Trim(key, " \t") != key || strings.ContainsAny(key, "\n\r") {
				t.Fatalf("%q of %q", variable, text)
			}
		}
		if strings.Contains(text, "\x00") {
			return
		}
		quoted := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "`", "\\`", `$`, `\$`).Replace(text)
		got := settings.ParseEnvironmentFile("A=b\nC=\"" + quoted + "\"\nD=e")
		if diff := cmp.Diff([]string{"A=b", "C=" + text, "D=e"}, got); diff != "" {
			t.Fatalf("%q (-want +got):\n%s", text, diff)
		}
	})
}
