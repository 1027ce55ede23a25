// Package settings fills a command's flags from the environment and from a
// configuration file, so that every setting has one name, one default and one
// parser wherever it comes from.
//
// The flag --foo-bar is the environment variable NAMETAP_FOO_BAR and the key
// foo-bar of the file. A flag whose environment variable has another, older name
// says so with [SetEnv]. The command line wins over the environment, that over
// the file, that over the default. Names that are not known and values that do
// not parse are errors.
package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Prefix begins the environment variables that are ours.
const Prefix = "NAMETAP_"

// ConfigFlag is the flag that names the configuration file. It is never taken
// from that file.
const ConfigFlag = "config"

// annotationEnv is the flag annotation that holds the environment variable.
const annotationEnv = "nametap/env"

// SetEnv gives a flag an environment variable of another name than its own. It
// panics if flags has no such flag, which is a programmer's mistake.
func SetEnv(flags *pflag.FlagSet, flag, env string) {
	if err := flags.SetAnnotation(flag, annotationEnv, []string{env}); err != nil {
		panic(err)
	}
}

// Env returns the environment variable of a flag.
func Env(flag *pflag.Flag) string {
	if env := flag.Annotations[annotationEnv]; len(env) == 1 {
		return env[0]
	}
	return Prefix + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
}

// Resolve gives every flag that the command line left alone its value from
// environ ("KEY=value" each) or from the file that --config or its environment
// variable names. An empty environment variable counts as not set.
func Resolve(flags *pflag.FlagSet, environ []string) error {
	if err := fromEnvironment(flags, environ); err != nil {
		return err
	}
	config := flags.Lookup(ConfigFlag)
	if config == nil || config.Value.String() == "" {
		return nil
	}
	path := config.Value.String()
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	if err := fromFile(flags, text); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

// serviceLink matches what Kubernetes puts into the environment of every pod for
// each Service of its namespace; one that is called nametap-something looks like
// a setting of ours and is none.
var serviceLink = regexp.MustCompile(`_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$`)

func fromEnvironment(flags *pflag.FlagSet, environ []string) error {
	byEnv := map[string]*pflag.Flag{}
	flags.VisitAll(func(flag *pflag.Flag) { byEnv[Env(flag)] = flag })
	for _, variable := range slices.Sorted(slices.Values(environ)) {
		key, value, _ := strings.Cut(variable, "=")
		flag, known := byEnv[key]
		switch {
		case value == "":
			continue
		case !known && strings.HasPrefix(key, Prefix) && !serviceLink.MatchString(key):
			return fmt.Errorf("environment variable %s=%q: no such setting; `--help` lists them", key, value)
		case !known || flag.Changed:
			continue
		}
		if err := flags.Set(flag.Name, value); err != nil {
			return fmt.Errorf("environment variable %s=%q: %w", key, value, Expected(flag, err))
		}
	}
	return nil
}

// fromFile reads a YAML mapping of flag names to values.
func fromFile(flags *pflag.FlagSet, text []byte) error {
	var document yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil // an empty file sets nothing
	} else if err != nil {
		return err
	}
	var more yaml.Node
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return errors.New("want one YAML document, found more")
	}
	root := document.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: want keys with values, such as `dns-addr: localhost:15053`", root.Line)
	}
	seen := map[string]int{}
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if first, twice := seen[key.Value]; twice {
			return fmt.Errorf("line %d: %s is already set on line %d", key.Line, key.Value, first)
		}
		seen[key.Value] = key.Line
		if err := setFromNode(flags, key, value); err != nil {
			return err
		}
	}
	return nil
}

// setFromNode sets one flag that nothing before the file has set.
func setFromNode(flags *pflag.FlagSet, key, value *yaml.Node) error {
	flag := flags.Lookup(key.Value)
	if flag == nil || key.Value == ConfigFlag {
		return fmt.Errorf("line %d: no such setting: %s; `--help` lists them, without the dashes", key.Line, key.Value)
	}
	texts, err := scalars(value)
	if err != nil {
		return fmt.Errorf("line %d: %s: %w", value.Line, key.Value, err)
	}
	if _, isList := flag.Value.(pflag.SliceValue); len(texts) != 1 && !isList {
		return fmt.Errorf("line %d: %s: want one value, found %d", value.Line, key.Value, len(texts))
	}
	if err := setChecked(flag, texts); err != nil {
		return fmt.Errorf("line %d: %s: %q: %w", value.Line, key.Value, strings.Join(texts, ","), Expected(flag, err))
	}
	return nil
}

// setChecked sets a flag that nothing before the file has set. Another one is
// only checked: a mistake in the file should not wait for the day on which the
// command line no longer hides it.
func setChecked(flag *pflag.Flag, texts []string) error {
	list, isList := flag.Value.(pflag.SliceValue)
	if !isList {
		before := flag.Value.String()
		err := flag.Value.Set(texts[0])
		if flag.Changed && err == nil {
			err = flag.Value.Set(before)
		}
		flag.Changed = true
		return err
	}
	before := list.GetSlice()
	err := list.Replace(texts)
	if flag.Changed && err == nil {
		err = list.Replace(before)
	}
	flag.Changed = true
	return err
}

// scalars returns the text of a scalar, or of every scalar of a list.
func scalars(node *yaml.Node) ([]string, error) {
	switch node.Kind {
	case yaml.ScalarNode:
		if node.Tag == "!!null" {
			return nil, errors.New("want a value, found none")
		}
		return []string{node.Value}, nil
	case yaml.SequenceNode:
		texts := make([]string, 0, len(node.Content))
		for _, item := range node.Content {
			if item.Kind != yaml.ScalarNode {
				return nil, errors.New("want plain values in the list")
			}
			texts = append(texts, item.Value)
		}
		return texts, nil
	default:
		return nil, errors.New("want a value or a list of values")
	}
}

// Expected says what a flag wants, where its parser's own words are for
// programmers.
func Expected(flag *pflag.Flag, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalid.Unwrap()
	}
	switch flag.Value.Type() {
	case "duration":
		return errors.New("want a duration with its unit, such as 300ms, 5s or 2m")
	case "int":
		return errors.New("want a whole number")
	case "bool":
		return errors.New("want true or false")
	default:
		return err
	}
}

// FlagError says what is wrong with a flag of the command line; it fits
// cobra.Command.SetFlagErrorFunc.
func FlagError(err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		return fmt.Errorf("--%s=%q: %w", invalid.GetFlag().Name, invalid.GetValue(), Expected(invalid.GetFlag(), err))
	}
	return err
}
