package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// wrongValues returns values that are wrong for a setting of the agent. Any text is right for a setting
// without one.
func wrongValues(flag *pflag.Flag) []string {
	const garbage = "no such!"
	anyText := []string{
		"cluster-id", "service-account", "labels-file", "xds-root-ca", "xds-token-file", "trust-domain", "xds-server-name", "resolv-conf",
	}
	if slices.Contains(anyText, flag.Name) {
		return nil
	}
	if more, found := map[string][]string{
		"ttl":      {"1ns", "2562047h"},
		"dns-addr": {":70000", "192.0.2.1", "host:53"}, "egress-addr": {":70000", "192.0.2.1"}, "status-addr": {":70000", "192.0.2.1"},
		"xds-addr": {"host", "host:0", ":1"}, "ca-addr": {"host", "host:0", ":1"}, "egress-proxy": {"host", "host:0", ":1"},
		"namespace": {"a.b"}, "egress-source": {"0.0.0.0", "192.0.2.1,192.0.2.2"}, "bypass": {".."},
		"upstream": {"192.0.2.1:0", "192.0.2.1=.."},
	}[flag.Name]; found {
		return append(more, garbage)
	}
	if flag.Name == "state-dir" {
		return []string{"/proc/self"} // no directory can be made there
	}
	return []string{garbage}
}

// execute runs a command that has to end at once, and returns its exit code.
func execute(args ...string) (int, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // a command that takes the setting ends, too
	root := newRootCommand()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	return exitCode(err), err
}

// isolate lets a command that takes a wrong setting change nothing of this host.
func isolate(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", t.TempDir()) // without iptables
	t.Setenv("POD_NAME", "web-0")
	t.Setenv("NOTIFY_SOCKET", "")
}

// agentArgs returns a command line of the agent with all settings that a start needs, except for one.
func agentArgs(wrong string) []string {
	given := map[string]string{
		dnsAddrFlag: "localhost:15053", statusAddrFlag: "localhost:0", egressAddrFlag: "localhost:15054", "egress": "true",
		"xds-addr": "127.0.0.1:1", "state-dir": "", "drain": "0s",
	}
	if strings.HasPrefix(wrong, "capture-") {
		given["capture"], given[enabledFlag] = "true", "false"
		given["capture-agent-uid"] = strconv.Itoa(os.Getuid()) // its queries have to pass
	}
	delete(given, wrong)
	args := []string{"agent"}
	for name, value := range given {
		args = append(args, "--"+name+"="+value)
	}
	return args
}

// TestWrongSettings checks that the agent ends with exit code 2 for every wrong value of every setting, on
// the command line, in the environment and in the --config file. R7.
func TestWrongSettings(t *testing.T) {
	isolate(t)
	newOptions(pflag.NewFlagSet("", pflag.ContinueOnError)).flags.VisitAll(func(flag *pflag.Flag) {
		for _, value := range wrongValues(flag) {
			args := agentArgs(flag.Name)
			for place, execute := range map[string]func() (int, error){
				"the command line": func() (int, error) { return execute(append(args, "--"+flag.Name+"="+value)...) },
				"the environment": func() (int, error) {
					t.Setenv(settings.Env(flag), value)
					defer os.Unsetenv(settings.Env(flag))
					return execute(args...)
				},
				"the file": func() (int, error) {
					os.Unsetenv(settings.Env(flag)) // it would win
					config := filepath.Join(t.TempDir(), "nametap.yaml")
					if err := os.WriteFile(config, []byte(flag.Name+": '"+value+"'\n"), 0o600); err != nil {
						t.Fatal(err)
					}
					return execute(append(args, "--config="+config)...)
				},
			} {
				said := value[strings.LastIndex(value, ",")+1:]
				if strings.HasSuffix(flag.Name, settings.ConfigFlag) && place == "the file" {
					said = flag.Name // which a file cannot set
				}
				if code, err := execute(); code != exitUsage || !strings.Contains(err.Error(), said) {
					t.Errorf("%s=%q in %s: exit code %d, %v", flag.Name, value, place, code, err)
				}
			}
		}
	})
}

// TestWrongFlags checks that every other command ends with exit code 2 for a flag whose value has not the
// form that it needs, and for an address that is none. R7.
func TestWrongFlags(t *testing.T) {
	isolate(t)
	const garbage = "no such!"
	check := func(args ...string) {
		if code, err := execute(args...); code != exitUsage {
			t.Errorf("%q: exit code %d, %v", args, code, err)
		}
	}
	var visit func(command *cobra.Command, args []string)
	visit = func(command *cobra.Command, args []string) {
		for _, sub := range command.Commands() {
			visit(sub, append(slices.Clone(args), sub.Name()))
		}
		command.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			if flag.Value.Set(garbage) != nil {
				check(append(args, "--"+flag.Name+"="+garbage)...)
			}
		})
		check(append(args, "--no-such-flag")...)
	}
	for _, command := range newRootCommand().Commands() {
		if command.Name() != "inject" { // the program nametap-discovery reads its flags
			visit(command, []string{command.Name()})
		}
	}
	for _, address := range []string{":70000", "192.0.2.1", garbage} {
		for _, command := range [][]string{{"status"}, {"status", "--wait=1s"}, {"table"}, {"cache"}, {"cache", "flush"}} {
			check(append(command, "--"+statusAddrFlag+"="+address)...)
		}
		check("query", "name", "--"+dnsAddrFlag+"="+address)
		for _, command := range []string{"apply", "status", "check", "print"} {
			check("capture", command, "--capture-enabled=false", "--"+dnsAddrFlag+"="+address)
		}
	}
}
