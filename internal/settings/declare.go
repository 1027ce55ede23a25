package settings

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A Group declares the settings below one heading of the help. The default of a setting is the value of its variable
// when the setting is declared. So each default stands in one place: in the Config that the setting belongs to.
type Group struct {
	flags *pflag.FlagSet
	title string
}

// NewGroup returns a group of the flags with this heading.
func NewGroup(flags *pflag.FlagSet, title string) Group {
	return Group{flags, title}
}

// Var declares a setting of any kind. A word of the usage in backquotes names the value
// in the help, as everywhere in pflag.
func (g Group) Var(value pflag.Value, name, usage string) Setting {
	flag := g.flags.VarPF(value, name, "", usage)
	flag.Annotations = map[string][]string{annotationGroup: {g.title}}
	return Setting{flag}
}

// String declares a setting that is a text.
func (g Group) String(p *string, name, usage string) Setting {
	return g.Var(OneOf(p), name, usage)
}

// Bool declares a setting that is true or false.
func (g Group) Bool(p *bool, name, usage string) Setting {
	return g.yesOrNo(yesNo(p, false), name, usage)
}

// Negated declares a setting that is true or false. *p gets the opposite of its value.
func (g Group) Negated(p *bool, name, usage string) Setting {
	return g.yesOrNo(yesNo(p, true), name, usage)
}

func (g Group) yesOrNo(value pflag.Value, name, usage string) Setting {
	setting := g.Var(value, name, usage)
	setting.flag.NoOptDefVal = "true" // --name alone
	return setting
}

// Text declares a setting of a type that reads and writes itself.
func (g Group) Text(p TextValue, name, usage string) Setting { return g.Var(textual(p), name, usage) }

// A Setting is one declared setting.
type Setting struct{ flag *pflag.Flag }

// Env gives the setting further environment variables: env, which the documents name, and its aliases. env wins over
// the aliases.
func (s Setting) Env(env string, aliases ...string) Setting {
	s.flag.Usage += " [" + env + "]"
	s.flag.Annotations[annotationEnv] = append([]string{env}, aliases...)
	return s
}

// DiscoveryAddress makes Istio's discoveryAddress set the setting, too.
func (s Setting) DiscoveryAddress() Setting {
	s.flag.Annotations[annotationField] = []string{discoveryAddress}
	return s
}

// Usages returns the help of the visible flags, below the headings of their groups and in the order in which they were
// declared. Flags without a group come first.
func Usages(flags *pflag.FlagSet) string {
	const ungrouped, width = "Flags", 110
	titles := []string{ungrouped}
	groups := map[string]*pflag.FlagSet{}
	flags.VisitAll(func(flag *pflag.Flag) {
		title := cmp.Or(strings.Join(flag.Annotations[annotationGroup], ""), ungrouped)
		if !slices.Contains(titles, title) {
			titles = append(titles, title)
		}
		if groups[title] == nil {
			groups[title] = pflag.NewFlagSet(title, pflag.ContinueOnError)
			groups[title].SortFlags = false
		}
		shown := *flag
		if shown.DefValue == "[]" {
			shown.DefValue = "" // pflag prints no empty default
		}
		groups[title].AddFlag(&shown)
	})
	var usages strings.Builder
	for _, title := range titles {
		if group := groups[title]; group != nil && group.HasAvailableFlags() {
			usages.WriteString("\n" + title + ":\n" + group.FlagUsagesWrapped(width))
		}
	}
	return usages.String()
}

// PrintUsage prints the usage of a command, with its flags in groups. It is for
// cobra.Command.SetUsageFunc; cobra's own function prints one list of flags. A template
// could print groups, too, but text/template makes the linker keep every exported method
// of the program.
func PrintUsage(command *cobra.Command) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Usage:\n  %s\n", command.UseLine())
	if command.HasAvailableSubCommands() {
		fmt.Fprintf(&text, "  %s [command]\n", command.CommandPath())
	}
	if command.HasExample() {
		fmt.Fprintf(&text, "\nExamples:\n%s\n", command.Example)
	}
	if command.HasAvailableSubCommands() {
		text.WriteString("\nCommands:\n")
	}
	for _, sub := range command.Commands() {
		if sub.IsAvailableCommand() {
			fmt.Fprintf(&text, "  %-*s %s\n", sub.NamePadding(), sub.Name(), sub.Short)
		}
	}
	text.WriteString(Usages(command.LocalFlags()))
	_, err := io.WriteString(command.OutOrStderr(), text.String())
	return err
}
