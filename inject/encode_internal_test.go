package inject

import (
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestEncode compares trees with those of the YAML library, as text.
func TestEncode(t *testing.T) {
	t.Parallel()
	text, p := "on", new(pod)
	p.Spec.Containers = []podContainer{{Name: istioProxy}}
	values := []any{
		volumes(DefaultConfig()), agentContainer(p, environment(p, nil, DefaultConfig()), DefaultConfig()),
		captureContainer(nil, DefaultConfig()), dnsConfig{}, dnsConfig{[]string{"127.0.0.1"}, nil, []dnsOption{{"ndots", &text}, {"use-vc", nil}}}, &text,
		env{Name: "A", ValueFrom: new(valueFrom)}, []string{}, []sysctl(nil),
	}
	for _, s := range []string{
		"", " ", "a", "y", "Yes", "no", "off", "true", "False", "null", "~", "1", "1.5", "0x1", "1e3", "1:30", "12:34:56", "-1", "+1", ".5", ".inf", "2020-01-01", "a: b", "a #b", "#a",
		"- a", "-", "?", "[a", "{a", "a\nb", "a\tb", "\"a\"", "'a'", "&a", "*a", "!a", "%a", "@a", "`a", "|", ">", "ü", "\u2028", "a\u0085b", "<<", "=", "metadata.annotations['x']", "10m", "128Mi", "--supervise",
	} {
		values = append(values, s, env{Name: s, Value: &s}, map[string]string{"a": s})
	}
	for _, v := range values {
		want := new(yaml.Node)
		if err := want.Encode(v); err != nil {
			t.Fatal(err)
		}
		got, err := encode(v)
		if err != nil {
			t.Fatal(err)
		}
		wanted, err := yaml.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := yaml.Marshal(got); err != nil || string(text) != string(wanted) || !same(want, got, false) {
			t.Errorf("%#v: %v\n%s, want\n%s", v, err, text, wanted)
		}
	}
	if _, err := encode(1.5); err == nil {
		t.Error("a float is encoded")
	}
}
