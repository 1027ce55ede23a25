package settings_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// values has settings of every kind.
type values struct {
	Addr    string
	Drain   time.Duration
	Conns   int
	Plain   bool
	Servers []string
}

func declare(v *values) *pflag.FlagSet {
	*v = values{Addr: "localhost:15053", Drain: 5 * time.Second, Conns: 1000}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.String(settings.ConfigFlag, "", "")
	group := settings.NewGroup(flags, "Test")
	group.String(&v.Addr, "dns-addr", "").Env("DNS_PROXY_ADDR").DiscoveryAddress()
	group.Var(settings.Duration(&v.Drain, settings.ZeroIsZero), "drain", "")
	group.Var(settings.Int(&v.Conns, settings.ZeroRefused), "max-tcp-conns", "")
	group.Bool(&v.Plain, "xds-plaintext", "")
	group.Var(settings.List(&v.Servers, settings.ParseString), "upstream", "")
	return flags
}

// resolve returns the settings of a file, if it is not empty, a command line and an environment.
func resolve(t *testing.T, file string, args, environ []string) (got values, err error) {
	t.Helper()
	flags := declare(&got)
	if file != "" {
		args = append(args, "--config="+write(t, file))
	}
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	err = settings.Resolve(flags, environ)
	return got, err
}

// R7: the command line wins over the environment, that over the file, that over
// the default, for every kind of value.
func TestResolvePrecedence(t *testing.T) {
	defaults := values{Addr: "localhost:15053", Drain: 5 * time.Second, Conns: 1000}
	for _, test := range []struct {
		name string
		file string
		env  []string
		args []string
		want func(v *values)
	}{
		{name: "default", want: func(*values) {}},
		{
			name: "file",
			file: "dns-addr: 127.0.0.1:1\ndrain: 1s\nmax-tcp-conns: 7\nxds-plaintext: true\nupstream: [192.0.2.1, 192.0.2.2]\n",
			want: func(v *values) {
				*v = values{"127.0.0.1:1", time.Second, 7, true, []string{"192.0.2.1", "192.0.2.2"}}
			},
		},
		{
			name: "environment over file",
			file: "dns-addr: 127.0.0.1:1\ndrain: 1s\nupstream: 192.0.2.1\n",
			env:  []string{"DNS_PROXY_ADDR=127.0.0.1:2", "NAMETAP_UPSTREAM=192.0.2.3,192.0.2.4"},
			want: func(v *values) {
				v.Addr, v.Drain, v.Servers = "127.0.0.1:2", time.Second, []string{"192.0.2.3", "192.0.2.4"}
			},
		},
		{
			name: "command line over both",
			file: "dns-addr: 127.0.0.1:1\nupstream: [192.0.2.1]\n",
			env:  []string{"DNS_PROXY_ADDR=127.0.0.1:2"},
			args: []string{"--dns-addr=127.0.0.1:3", "--upstream=192.0.2.9"},
			want: func(v *values) { v.Addr, v.Servers = "127.0.0.1:3", []string{"192.0.2.9"} },
		},
		{
			name: "an empty variable is not set",
			env:  []string{"DNS_PROXY_ADDR=", "NAMETAP_DRAIN="},
			want: func(*values) {},
		},
		{
			name: "what Kubernetes says of a Service called nametap-discovery",
			env: []string{
				"NAMETAP_DISCOVERY_SERVICE_HOST=10.96.0.7", "NAMETAP_DISCOVERY_SERVICE_PORT=15010",
				"NAMETAP_DISCOVERY_SERVICE_PORT_GRPC=15010", "NAMETAP_DISCOVERY_PORT=tcp://10.96.0.7:15010",
				"NAMETAP_DISCOVERY_PORT_15010_TCP=tcp://10.96.0.7:15010", "NAMETAP_DISCOVERY_PORT_15010_TCP_ADDR=10.96.0.7",
			},
			want: func(*values) {},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := resolve(t, test.file, test.args, test.env)
			if err != nil {
				t.Fatal(err)
			}
			want := defaults
			test.want(&want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

// R7: mistakes are refused with the key, the value and what was expected.
func TestResolveRefuses(t *testing.T) {
	for _, test := range []struct {
		name string
		file string
		env  []string
		args []string
		want []string
	}{
		{name: "unknown variable", env: []string{"NAMETAP_DRIAN=5s"}, want: []string{"NAMETAP_DRIAN", "5s", "no such setting", "did you mean NAMETAP_DRAIN?"}},
		{name: "no unit", env: []string{"NAMETAP_DRAIN=5"}, want: []string{"NAMETAP_DRAIN", `"5"`, "unit"}},
		{name: "no number", env: []string{"NAMETAP_MAX_TCP_CONNS=many"}, want: []string{"NAMETAP_MAX_TCP_CONNS", "many", "whole number"}},
		{name: "unknown key", file: "drain: 1s\ndrian: 5s\n", want: []string{"line 2", "drian", "no such setting", "did you mean drain?"}},
		{name: "key twice", file: "drain: 1s\ndrain: 2s\n", want: []string{"line 2", "drain", "line 1"}},
		{name: "bad bool", file: "xds-plaintext: perhaps\n", want: []string{"line 1", "xds-plaintext", "perhaps", "true or false"}},
		{name: "list for one", file: "drain: [1s, 2s]\n", want: []string{"line 1", "drain", "one value"}},
		{name: "mapping", file: "drain: {a: b}\n", want: []string{"line 1", "drain"}},
		{name: "null", file: "drain:\n", want: []string{"line 1", "drain", "want a value"}},
		{name: "no mapping", file: "- drain\n", want: []string{"line 1", "want keys"}},
		{name: "twice", file: "upstream: 192.0.2.1\nupstream: 192.0.2.2\n", want: []string{"line 2", "upstream", "already set on line 1"}},
		{
			name: "every mistake", file: "drain: soon\ndrian: 1s\n", env: []string{"NAMETAP_MAX_TCP_CONNS=0"},
			want: []string{"NAMETAP_MAX_TCP_CONNS", "more than 0", "line 1", "line 2"},
		},
		{name: "two documents", file: "drain: 1s\n---\ndrain: 2s\n", want: []string{"one YAML document"}},
		{name: "no YAML", file: "\tdrain", want: []string{"not valid YAML"}},
		{name: "no YAML in line 2", file: "drain: 5s\nupstream: [a\nttl: 5s\n", want: []string{"line 2: not valid YAML"}},
		{name: "config in the file", file: "config: other.yaml\n", want: []string{"line 1", "config"}},
		{
			name: "bad value behind the command line's", file: "drain: soon\n", args: []string{"--drain=1s"},
			want: []string{"line 1", "drain", "soon", "unit"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := resolve(t, test.file, test.args, test.env)
			if err == nil {
				t.Fatalf("accepted: %+v", got)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestResolveMissingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "absent.yaml")
	if _, err := resolve(t, "", []string{"--config=" + path}, nil); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v does not name %s", err, path)
	}
}

// R7: a malformed flag of the command line is refused in the same words, and an unknown one with what it may mean.
func TestFlagError(t *testing.T) {
	for arg, wanted := range map[string][]string{
		"--drain=5":  {"--drain", `"5"`, "unit"},
		"--drian=5s": {"unknown flag: --drian", "did you mean drain?"},
		"--other":    {"unknown flag: --other", "--help"},
	} {
		var got values
		command := new(cobra.Command)
		command.Flags().AddFlagSet(declare(&got))
		err := command.Flags().Parse([]string{arg})
		for _, want := range wanted {
			if text := settings.FlagError(command, err).Error(); !strings.Contains(text, want) {
				t.Errorf("error %q does not say %q", text, want)
			}
		}
	}
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "nametap.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// R7: a setting with variables of Istio takes these as well as its own one. Its own one wins,
// then the order in which they were declared.
func TestSeveralVariables(t *testing.T) {
	for _, tc := range []struct {
		environ []string
		want    string
		source  string
	}{
		{[]string{"ISTIO_NAMESPACE=c"}, "c", "ISTIO_NAMESPACE"},
		{[]string{"ISTIO_NAMESPACE=c", "POD_NAMESPACE=b"}, "b", "POD_NAMESPACE"},
		{[]string{"ISTIO_NAMESPACE=c", "POD_NAMESPACE=b", "NAMETAP_NAMESPACE=a"}, "a", "NAMETAP_NAMESPACE"},
		{[]string{"ISTIO_NAMESPACE=c", "POD_NAMESPACE="}, "c", "ISTIO_NAMESPACE"},
	} {
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		got := new(string)
		settings.NewGroup(flags, "Test").String(got, "namespace", "").Env("POD_NAMESPACE", "ISTIO_NAMESPACE")
		if err := settings.Resolve(flags, tc.environ); err != nil {
			t.Fatal(err)
		}
		if source := settings.Source(flags.Lookup("namespace")); *got != tc.want || source != "environment variable "+tc.source {
			t.Errorf("%v: %q from %s, want %q from %s", tc.environ, *got, source, tc.want, tc.source)
		}
		if env := settings.Env(flags.Lookup("namespace")); env != "POD_NAMESPACE" {
			t.Errorf("documents name %s", env)
		}
	}
}

// C1: variables for node metadata come from the environment, the annotation and the mesh
// config. The fields of these two may have their names of protobuf.
func TestMetadata(t *testing.T) {
	var got values
	flags := declareMesh(&got)
	mesh := "default_config: {discovery_address: '127.0.0.1:3', proxy_metadata: {ISTIO_META_A: mesh, ISTIO_META_B: mesh, ISTIO_META_C: mesh, OTHER: x}}"
	if err := flags.Parse([]string{"--mesh-config=" + write(t, mesh)}); err != nil {
		t.Fatal(err)
	}
	environ := []string{
		"ISTIO_META_A=env", "ISTIO_META_EMPTY=",
		`PROXY_CONFIG={"proxy_metadata":{"ISTIO_META_A":"pod","ISTIO_META_B":"pod","NAMETAP_DRAIN":"3s"},"proxyMetadata":{"ISTIO_META_B":"json"}}`,
	}
	if err := settings.Resolve(flags, environ); err != nil {
		t.Fatal(err)
	}
	if got.Addr != "127.0.0.1:3" || got.Drain != 3*time.Second {
		t.Errorf("%+v", got)
	}
	found, err := settings.Metadata(flags, environ, "ISTIO_META_")
	want := map[string]string{"ISTIO_META_A": "env", "ISTIO_META_B": "json", "ISTIO_META_C": "mesh"}
	if err != nil || !maps.Equal(found, want) {
		t.Errorf("%v, %v, want %v", found, err, want)
	}
}
