// Package settings declares a command's settings and gives them their values. A setting has one name, one default and
// one parser, wherever its value comes from.
//
// A setting is declared once, in a [Group]. The declaration has the variable for the value, the name and the help,
// and further names if there are any. For the flag --foo-bar, the environment variable is NAMETAP_FOO_BAR, and the
// key in the file is foo-bar. If Istio's agent has an environment variable for a setting, the setting takes that
// variable, too. The variables may also stand in proxyMetadata of Istio's ProxyConfig. The ProxyConfig of a pod is
// in an annotation, and the environment variable PROXY_CONFIG has its text. The ProxyConfig for all pods is in the
// mesh config file.
//
// The sources are, from the strongest to the weakest: the command line, the environment, the annotation, the mesh
// config, the file, the default. Unknown names and malformed values are errors. The environment and Istio's
// configuration also have settings of other programs: there, only unknown names that begin with NAMETAP_ are errors.
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

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/yamltext"
)

// Prefix is the beginning of the names of nametap's environment variables.
const Prefix = "NAMETAP_"

// ConfigFlag is the flag that names the configuration file. The file itself cannot set this flag.
const ConfigFlag = "config"

// Annotations of flags: the heading in the help, further environment variables, and
// where the value came from.
const (
	annotationGroup  = "nametap/group"
	annotationEnv    = "nametap/env"
	annotationSource = "nametap/source"
)

// Env returns the environment variable of a flag, as the documents name it.
func Env(flag *pflag.Flag) string {
	if env := flag.Annotations[annotationEnv]; len(env) > 0 {
		return env[0]
	}
	return ownEnv(flag.Name)
}

// ownEnv returns the environment variable that follows from a flag's name.
func ownEnv(name string) string {
	return Prefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

// IsSetting reports whether a flag was declared in a [Group]. Other flags are only for the command line.
func IsSetting(flag *pflag.Flag) bool { return len(flag.Annotations[annotationGroup]) > 0 }

// envs returns all environment variables of a flag. If several are set, the first of them wins.
func envs(flag *pflag.Flag) []string {
	return append([]string{ownEnv(flag.Name)}, flag.Annotations[annotationEnv]...)
}

// Source returns where the value of a flag came from, for messages.
func Source(flag *pflag.Flag) string {
	switch source := flag.Annotations[annotationSource]; {
	case len(source) == 1:
		return source[0]
	case flag.Changed:
		return "--" + flag.Name
	}
	return "default"
}

// Resolve gives every flag that is not on the command line its value from environ
// ("KEY=value" each), from Istio's configuration, or from the file that --config or its
// environment variable names. An empty variable counts as not set. The error has a line for
// each mistake; all other settings have their values.
func Resolve(flags *pflag.FlagSet, environ []string) error {
	return errors.Join(
		fromEnvironment(flags, environ),
		fromProxyConfig(flags, environ),
		fromMeshConfig(flags),
		fromConfigFile(flags),
	)
}

// FromEnvironment gives the flags that are not on the command line their values from environ, and from the pod's
// annotation in environ. Unlike [Resolve] it reads no file.
func FromEnvironment(flags *pflag.FlagSet, environ []string) error {
	return errors.Join(fromEnvironment(flags, environ), fromProxyConfig(flags, environ))
}

// Values returns the values of the flags that do not have their default, because the command line or another
// source has set them. The keys are the names of the flags. Flags for which wanted returns false are left out.
func Values(flags *pflag.FlagSet, wanted func(name string) bool) map[string][]string {
	values := map[string][]string{}
	flags.VisitAll(func(flag *pflag.Flag) {
		if flag.Changed && wanted(flag.Name) {
			values[flag.Name] = textsOf(flag)
		}
	})
	return values
}

// Adopt gives the flags that are not set yet the values of another process, as [Values] returned them there.
// Names that this program does not have are ignored. source says where the values come from, for messages.
func Adopt(flags *pflag.FlagSet, values map[string][]string, source string) error {
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		flag := flags.Lookup(name)
		if flag == nil || flag.Changed {
			continue
		}
		if err := setChecked(flag, values[name]); err != nil {
			failed = append(failed,
				fmt.Errorf("%s of %s: %q: %w", name, source, strings.Join(values[name], ","), expected(flag, err)))
			continue
		}
		setSource(flag, source)
	}
	return errors.Join(failed...)
}

// Copy copies the values of flags, and their sources, from one FlagSet to another. It leaves out flags without a
// value of their own (not Changed), flags for which wanted returns false, and flags that are missing in to.
func Copy(to, from *pflag.FlagSet, wanted func(flag *pflag.Flag) bool) error {
	var failed []error
	from.VisitAll(func(flag *pflag.Flag) {
		copied := to.Lookup(flag.Name)
		if !flag.Changed || copied == nil || !wanted(flag) {
			return
		}
		failed = append(failed, setTexts(copied, textsOf(flag)))
		copied.Changed = true
		if source := flag.Annotations[annotationSource]; len(source) > 0 {
			setSource(copied, source[0])
		}
	})
	return errors.Join(failed...)
}

// Given reports whether the command line gave a flag its value.
func Given(flag *pflag.Flag) bool {
	return flag.Changed && len(flag.Annotations[annotationSource]) == 0
}

// serviceLink matches the variables that Kubernetes sets in every pod for each Service of its
// namespace. The variables of a Service called nametap-something look like settings of
// nametap.
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

// setAll gives the flags that are not set yet the values of their variables. Variables that begin with Prefix must be
// settings; all others may be for other programs.
func setAll(flags *pflag.FlagSet, values map[string]string, source func(key string) string) []error {
	known := map[string]bool{}
	var failed []error
	flags.VisitAll(func(flag *pflag.Flag) {
		if !IsSetting(flag) {
			return
		}
		for _, key := range envs(flag) {
			known[key] = true
			if err := set(flags, flag, values[key], source(key)); err != nil {
				failed = append(failed, fmt.Errorf("%s=%q: %w", key, values[key], expected(flag, err)))
			}
		}
	})
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if !known[key] && strings.HasPrefix(key, Prefix) && !serviceLink.MatchString(key) {
			failed = append(failed, fmt.Errorf("%s=%q: no such setting%s", key, values[key], meant(key, known)))
		}
	}
	return failed
}

// set gives a flag a value that is not empty, unless the flag is set already.
func set(flags *pflag.FlagSet, flag *pflag.Flag, value, source string) error {
	if value == "" || flag.Changed {
		return nil
	}
	if err := flags.Set(flag.Name, value); err != nil {
		return err
	}
	setSource(flag, source)
	return nil
}

// setSource notes where the value of a flag came from.
func setSource(flag *pflag.Flag, source string) {
	if flag.Annotations == nil {
		flag.Annotations = map[string][]string{}
	}
	flag.Annotations[annotationSource] = []string{source}
}

func fromEnvironment(flags *pflag.FlagSet, environ []string) error {
	source := func(key string) string { return "environment variable " + key }
	return inPlace("environment variable ", setAll(flags, variables(environ), source))
}

// inPlace joins mistakes, and puts place before each of them.
func inPlace(place string, mistakes []error) error {
	for i, err := range mistakes {
		mistakes[i] = fmt.Errorf("%s%w", place, err)
	}
	return errors.Join(mistakes...)
}

// fromConfigFile sets the flags that the file of --config names.
func fromConfigFile(flags *pflag.FlagSet) error {
	config := flags.Lookup(ConfigFlag)
	if config == nil || config.Value.String() == "" {
		return nil
	}
	path := config.Value.String()
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	return inPlace("configuration "+path+": ", fromFile(flags, path, text))
}

// fromFile reads a YAML mapping of flag names to values.
func fromFile(flags *pflag.FlagSet, path string, text []byte) []error {
	var document yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil // an empty file sets nothing
	} else if err != nil {
		return []error{yamltext.OneLine(err)}
	}
	var more yaml.Node
	if err := decoder.Decode(&more); !errors.Is(err, io.EOF) {
		return []error{errors.New("want one YAML document, found more")}
	}
	root := document.Content[0]
	if root.Kind != yaml.MappingNode {
		return []error{fmt.Errorf("line %d: want keys with values, such as `dns-addr: localhost:15053`", root.Line)}
	}
	var failed []error
	seen := map[*pflag.Flag]int{}
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		flag := flags.Lookup(key.Value)
		first, twice := seen[flag]
		switch {
		case flag == nil || !IsSetting(flag) || flag.Name == ConfigFlag || flag.Name == MeshConfigFlag:
			failed = append(failed,
				fmt.Errorf("line %d: no such setting: %s%s", key.Line, key.Value, meant(key.Value, names(flags))))
			continue
		case twice:
			failed = append(failed, fmt.Errorf("line %d: %s is already set on line %d", key.Line, flag.Name, first))
			continue
		}
		seen[flag] = key.Line
		if err := setFromNode(flag, path, value); err != nil {
			failed = append(failed, err)
		}
	}
	return failed
}

// setFromNode sets one flag from the file of this path, unless the flag is set already.
func setFromNode(flag *pflag.Flag, path string, value *yaml.Node) error {
	texts, err := scalars(value)
	if err != nil {
		return fmt.Errorf("line %d: %s: %w", value.Line, flag.Name, err)
	}
	changed := flag.Changed
	if err := setChecked(flag, texts); err != nil {
		return fmt.Errorf("line %d: %s: %q: %w", value.Line, flag.Name, strings.Join(texts, ","), expected(flag, err))
	}
	if !changed {
		setSource(flag, path)
	}
	return nil
}

// setChecked sets a flag that is not set yet. If the flag is set already, it only checks the
// value: a mistake in the file should not stay hidden until the command line no longer sets
// the flag.
func setChecked(flag *pflag.Flag, texts []string) error {
	previous := textsOf(flag)
	err := setTexts(flag, texts)
	if flag.Changed && err == nil {
		err = setTexts(flag, previous)
	}
	flag.Changed = true
	return err
}

// textsOf returns the value of a flag as texts: the values of a list, or one text.
func textsOf(flag *pflag.Flag) []string {
	if list, ok := flag.Value.(pflag.SliceValue); ok {
		return list.GetSlice()
	}
	return []string{flag.Value.String()}
}

// setTexts gives a flag a value in the form of textsOf.
func setTexts(flag *pflag.Flag, texts []string) error {
	if list, ok := flag.Value.(pflag.SliceValue); ok {
		return list.Replace(texts)
	}
	if len(texts) != 1 {
		return fmt.Errorf("want one value, found %d", len(texts))
	}
	return flag.Value.Set(texts[0])
}

// scalars returns the text of a scalar, or the texts of a list of scalars.
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

// expected returns an error that says what a flag wants. pflag's own error for a bool names a
// function of Go instead.
func expected(flag *pflag.Flag, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalid.Unwrap()
	}
	if flag.Value.Type() == "bool" {
		return errors.New("want true or false")
	}
	return err
}

// FlagError returns an error that names a malformed flag of the command line, its value and
// what was expected, or the flag that an unknown one may stand for. It is for cobra.Command.SetFlagErrorFunc.
func FlagError(command *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	var unknown *pflag.NotExistError
	switch {
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s=%q: %w", invalid.GetFlag().Name, invalid.GetValue(), expected(invalid.GetFlag(), err))
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "":
		return fmt.Errorf("unknown flag: --%s%s", unknown.GetSpecifiedName(), meant(unknown.GetSpecifiedName(), names(command.Flags())))
	}
	return err
}

// names returns the names of flags.
func names(flags *pflag.FlagSet) map[string]bool {
	found := map[string]bool{}
	flags.VisitAll(func(flag *pflag.Flag) { found[flag.Name] = true })
	return found
}

// meant returns the end of an error about an unknown name: the known names that differ from it in at most two letters.
func meant(name string, known map[string]bool) string {
	similar := &cobra.Command{SuggestionsMinimumDistance: 2} // cobra compares the names of subcommands
	for known := range known {
		similar.AddCommand(&cobra.Command{Use: known, Run: func(*cobra.Command, []string) {}})
	}
	found := similar.SuggestionsFor(name)
	slices.Sort(found)
	if len(found) == 0 || len(found) > 3 {
		return "; `--help` lists them"
	}
	return "; did you mean " + strings.Join(found, " or ") + "?"
}
