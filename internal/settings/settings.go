// Package settings fills a command's flags from the environment and from a
// configuration file, so that every setting has one name, one default and one
// parser wherever it comes from.
//
// The flag --foo-bar is the environment variable NAMETAP_FOO_BAR and the key
// foo-bar of the file. A flag that Istio's agent has an environment variable for
// takes that too, by [SetEnv]. The variables may also stand in proxyMetadata of Istio's
// ProxyConfig: the pod's annotation, which is in the environment variable
// PROXY_CONFIG, or the default that the mesh config file has for all.
//
// The command line wins over the environment, that over the annotation, over the mesh
// config, over the file, over the default. Names that are not known and values that
// do not parse are errors; in Istio's configuration, whose other names are for
// others, only those that begin with NAMETAP_.
package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
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

// Annotations of flags: the environment variable, and where the value came from.
const (
	annotationEnv    = "nametap/env"
	annotationSource = "nametap/source"
)

// SetEnv gives a flag environment variables of other names than its own: the one that
// documents name, and further ones that it wins over. It panics if flags has no such
// flag, which is a programmer's mistake.
func SetEnv(flags *pflag.FlagSet, flag, env string, more ...string) {
	if err := flags.SetAnnotation(flag, annotationEnv, append([]string{env}, more...)); err != nil {
		panic(err)
	}
}

// Env returns the environment variable of a flag, as documents name it.
func Env(flag *pflag.Flag) string {
	if env := flag.Annotations[annotationEnv]; len(env) > 0 {
		return env[0]
	}
	return ownEnv(flag)
}

// ownEnv returns the variable that is made of the flag's name.
func ownEnv(flag *pflag.Flag) string {
	return Prefix + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
}

// envs returns all environment variables of a flag; an earlier one wins.
func envs(flag *pflag.Flag) []string {
	return append([]string{ownEnv(flag)}, flag.Annotations[annotationEnv]...)
}

// Source says where the value of a flag came from, for people.
func Source(flag *pflag.Flag) string {
	switch source := flag.Annotations[annotationSource]; {
	case len(source) == 1:
		return source[0]
	case flag.Changed:
		return "--" + flag.Name
	}
	return "the default"
}

// Resolve gives every flag that the command line left alone its value from
// environ ("KEY=value" each), from Istio's configuration, or from the file that
// --config or its environment variable names. An empty value counts as not set.
func Resolve(flags *pflag.FlagSet, environ []string) error {
	if err := fromEnvironment(flags, environ); err != nil {
		return err
	}
	if err := fromProxyConfig(flags, environ); err != nil {
		return err
	}
	if err := fromMeshConfig(flags); err != nil {
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
	if err := fromFile(flags, path, text); err != nil {
		return fmt.Errorf("configuration %s: %w", path, err)
	}
	return nil
}

// serviceLink matches what Kubernetes puts into the environment of every pod for
// each Service of its namespace; one that is called nametap-something looks like
// a setting of ours and is none.
var serviceLink = regexp.MustCompile(`_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$`)

// variables returns the variables of environ that have a value.
func variables(environ []string) map[string]string {
	values := map[string]string{}
	for _, variable := range environ {
		if key, value, _ := strings.Cut(variable, "="); value != "" {
			values[key] = value
		}
	}
	return values
}

// setAll gives the flags that nothing before has set the values of variables. Those
// that begin with Prefix must be settings; the others may be for other programs.
func setAll(flags *pflag.FlagSet, values map[string]string, source func(key string) string) error {
	known := map[string]bool{}
	var failed error
	flags.VisitAll(func(flag *pflag.Flag) {
		for _, key := range envs(flag) {
			known[key] = true
			if err := set(flags, flag, values[key], source(key)); err != nil && failed == nil {
				failed = fmt.Errorf("%s=%q: %w", key, values[key], Expected(flag, err))
			}
		}
	})
	if failed != nil {
		return failed
	}
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if !known[key] && strings.HasPrefix(key, Prefix) && !serviceLink.MatchString(key) {
			return fmt.Errorf("%s=%q: no such setting; `--help` lists them", key, values[key])
		}
	}
	return nil
}

// set gives a flag a value that is not empty, unless something before has set it.
func set(flags *pflag.FlagSet, flag *pflag.Flag, value, source string) error {
	if value == "" || flag.Changed {
		return nil
	}
	if err := flags.Set(flag.Name, value); err != nil {
		return err
	}
	return flags.SetAnnotation(flag.Name, annotationSource, []string{source})
}

func fromEnvironment(flags *pflag.FlagSet, environ []string) error {
	err := setAll(flags, variables(environ), func(key string) string { return "the environment variable " + key })
	if err != nil {
		return fmt.Errorf("environment variable %w", err)
	}
	return nil
}

// fromFile reads a YAML mapping of flag names to values.
func fromFile(flags *pflag.FlagSet, path string, text []byte) error {
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
		changed := flags.Changed(key.Value)
		if err := setFromNode(flags, key, value); err != nil {
			return err
		}
		if changed {
			continue
		}
		if err := flags.SetAnnotation(key.Value, annotationSource, []string{path}); err != nil {
			return err
		}
	}
	return nil
}

// setFromNode sets one flag that nothing before the file has set.
func setFromNode(flags *pflag.FlagSet, key, value *yaml.Node) error {
	flag := flags.Lookup(key.Value)
	if flag == nil || key.Value == ConfigFlag || key.Value == MeshConfigFlag {
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
	case "uint16":
		return errors.New("want a whole number from 0 to 65535")
	case "uintSlice":
		return errors.New("want whole numbers, such as 1337 (of a user: `id -u NAME`)")
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
