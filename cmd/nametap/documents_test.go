package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/settings"
)

// R7: the reference configuration has the names and the defaults of all flags, in their
// order; it names the environment variables that do not follow from the key; and the agent
// accepts it.
func TestReferenceConfiguration(t *testing.T) {
	const path = "../../docs/nametap.yaml"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	type setting struct{ Key, Default, Env string }
	var documented, declared []setting
	special := regexp.MustCompile(`\[([A-Z_]+)\]`)
	content := document.Content[0].Content
	for i := 0; i < len(content); i += 2 {
		s := setting{Key: content[i].Value, Default: content[i+1].Value}
		if content[i+1].Kind == yaml.SequenceNode {
			var items []string
			for _, item := range content[i+1].Content {
				items = append(items, item.Value)
			}
			s.Default = "[" + strings.Join(items, ",") + "]"
		}
		if env := special.FindStringSubmatch(content[i].HeadComment); env != nil {
			s.Env = env[1]
		}
		documented = append(documented, s)
	}
	flags := newAgentCommand().Flags()
	flags.VisitAll(func(flag *pflag.Flag) {
		if !settings.IsSetting(flag) || flag.Name == settings.ConfigFlag || flag.Name == settings.MeshConfigFlag {
			return
		}
		s := setting{Key: flag.Name, Default: flag.DefValue}
		if env := settings.Env(flag); !strings.HasPrefix(env, settings.Prefix) {
			s.Env = env
			if !strings.Contains(flag.Usage, "["+env+"]") {
				t.Errorf("the help of --%s does not name [%s]", flag.Name, env)
			}
		}
		declared = append(declared, s)
	})
	if diff := cmp.Diff(declared, documented); diff != "" {
		t.Errorf("%s (-flags +file):\n%s", path, diff)
	}

	o := newOptions(pflag.NewFlagSet("agent", pflag.ContinueOnError))
	// The directory of the file is the machine's: only root can make it.
	if err := o.flags.Parse([]string{"--config", path, "--" + stateDirFlag, t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	if err := settings.Resolve(o.flags, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := o.config(); err != nil {
		t.Error(err)
	}
}

// R7: injection knows the settings of the agent, and what their values are: it refuses a wrong value unless the
// flag takes any text.
func TestInjectionSettings(t *testing.T) {
	newAgentCommand().Flags().VisitAll(func(flag *pflag.Flag) {
		var mistake string
		value := strings.Trim(flag.DefValue, "[]")
		switch err := (inject.Config{Settings: map[string]string{flag.Name: value}}).Check(); {
		case !settings.IsSetting(flag):
			return
		case err != nil && strings.Contains(err.Error(), "it follows from"):
			return
		case err != nil:
			mistake = err.Error()
		case flag.Value.Set(value) != nil && value != "":
			mistake = "the agent refuses the default"
		default:
			const wrong = "no value of a setting"
			refused := (inject.Config{Settings: map[string]string{flag.Name: wrong}}).Check() != nil
			if agent := flag.Value.Set(wrong) != nil && flag.Value.Type() != "strings"; agent != refused && flag.Value.Type() != "string" || refused && !agent {
				mistake = fmt.Sprintf("refused by injection is %v, by the agent %v", refused, agent)
			}
		}
		if mistake != "" {
			t.Errorf("--%s: %s", flag.Name, mistake)
		}
	})
}

// P9: the schema of the chart allows the settings of the agent that injection accepts, and no other. It allows
// their defaults, and no text that injection refuses.
func TestChartSettings(t *testing.T) {
	text, err := os.ReadFile("../../deploy/chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Properties struct {
			Injection struct {
				Properties struct {
					Settings struct{ PropertyNames struct{ Enum []string } }
				}
			}
		}
		Definitions map[string]json.RawMessage
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	kinds := schemaKinds{}
	var agentSettings struct{ Properties map[string]schemaKind }
	for name, definition := range schema.Definitions {
		var kind schemaKind
		if err := json.Unmarshal(definition, &kind); name != "settings" && err != nil {
			t.Fatal(name, err)
		}
		kinds[name] = kind
	}
	if err := json.Unmarshal(schema.Definitions["agentSettings"], &agentSettings); err != nil {
		t.Fatal(err)
	}
	var accepted []string
	newAgentCommand().Flags().VisitAll(func(flag *pflag.Flag) {
		check := func(value string) error {
			return inject.Config{Settings: map[string]string{flag.Name: value}}.Check()
		}
		if flag.Name == "help" || check(flag.DefValue) != nil {
			return
		}
		accepted = append(accepted, flag.Name)
		kind := agentSettings.Properties[flag.Name]
		if flag.Value.Type() != "strings" && !kinds.allow(kind, flag.DefValue) {
			t.Errorf("the chart refuses --%s=%s, the default", flag.Name, flag.DefValue)
		}
		for _, value := range []string{
			"", "0", "30", "-1", "0s", "0.0s", "5s", "1.5h", "-5s", "300ms", "596524h", "9999999999h", "999999h99999h99999h", "1h1m1s", "2147483648s", "1e6", "0x10", "8KiB", "0KiB", "8MB",
			"511", "512", "65534", "65535", "65536", "4294967295", "4294967296", "true", "yes", "on", "auto", "all", "debug", "INFO+4", "text",
		} {
			err := check(value)
			if err != nil && kinds.allow(kind, value) {
				t.Errorf("the chart allows --%s=%q: %v", flag.Name, value, err)
			}
			// The agent reads each value as injection does; a list or a text may have another form.
			if flag.Value.Type() != "strings" && flag.Value.Type() != "string" && err == nil {
				if refused := flag.Value.Set(value); refused != nil {
					t.Errorf("injection accepts --%s=%q, and the agent does not: %v", flag.Name, value, refused)
				}
			}
		}
	})
	slices.Sort(accepted)
	if diff := cmp.Diff(accepted, schema.Properties.Injection.Properties.Settings.PropertyNames.Enum); diff != "" {
		t.Errorf("settings that injection accepts (-) and those of values.schema.json (+):\n%s", diff)
	}
}

// A schemaKind is what the schema of the chart says about a value.
type schemaKind struct {
	Ref     string `json:"$ref"`
	Type    string
	Pattern string
	Enum    []any
	AnyOf   []schemaKind
}

// schemaKinds are the definitions of the schema.
type schemaKinds map[string]schemaKind

// allow reports whether the schema allows a text. The zero kind allows all.
func (s schemaKinds) allow(kind schemaKind, text string) bool {
	switch {
	case kind.Ref != "":
		return s.allow(s[strings.TrimPrefix(kind.Ref, "#/definitions/")], text)
	case kind.AnyOf != nil:
		return slices.ContainsFunc(kind.AnyOf, func(k schemaKind) bool { return k.Type == "string" && s.allow(k, text) })
	case kind.Enum != nil:
		return slices.Contains(kind.Enum, any(text))
	}
	return regexp.MustCompile(kind.Pattern).MatchString(text)
}
