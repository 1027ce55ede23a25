package settings_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// declareMesh declares the settings of declare, and the mesh config file.
func declareMesh(v *values) *pflag.FlagSet {
	flags := declare(v)
	flags.String(settings.MeshConfigFlag, "", "")
	return flags
}

// R7: the environment wins over the pod's annotation, that over the mesh config, that over
// the file; and Source returns where a value came from.
func TestMeshPrecedence(t *testing.T) {
	dir := t.TempDir()
	file, mesh := filepath.Join(dir, "nametap.yaml"), filepath.Join(dir, "mesh")
	for path, text := range map[string]string{
		file: "drain: 1s\nmax-tcp-conns: 1\nxds-plaintext: false\ndns-addr: 127.0.0.1:1\nupstream: [192.0.2.1]\n",
		mesh: "rootNamespace: istio-system\ndefaultConfig:\n  discoveryAddress: 127.0.0.1:2\n  proxyMetadata:\n" +
			"    NAMETAP_DRAIN: 2s\n    NAMETAP_MAX_TCP_CONNS: 2\n    NAMETAP_XDS_PLAINTEXT: true\n    ISTIO_META_OTHER: x\n    NAMETAP_CONFIG: no\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var got values
	flags := declareMesh(&got)
	if err := flags.Parse([]string{"--config=" + file, "--mesh-config=" + mesh}); err != nil {
		t.Fatal(err)
	}
	err := settings.Resolve(flags, []string{
		"NAMETAP_DRAIN=4s",
		`PROXY_CONFIG={"proxyMetadata":{"NAMETAP_DRAIN":"3s","NAMETAP_MAX_TCP_CONNS":"3"},"concurrency":2}`,
	})
	if err != nil {
		t.Fatal(err)
	}
	if got.Drain != 4*time.Second || got.Conns != 3 || !got.Plain || got.Addr != "127.0.0.1:2" || got.Servers[0] != "192.0.2.1" {
		t.Errorf("%+v", got)
	}
	for name, want := range map[string]string{
		"drain": "environment variable NAMETAP_DRAIN", "max-tcp-conns": "PROXY_CONFIG",
		"xds-plaintext": "mesh config " + mesh, "dns-addr": "mesh config " + mesh,
		"upstream": file, "config": "--config",
	} {
		if got := settings.Source(flags.Lookup(name)); got != want {
			t.Errorf("%s is from %s, want %s", name, got, want)
		}
	}
	if got := settings.Source(declare(new(values)).Lookup("drain")); got != "default" {
		t.Errorf("nothing set it: %s", got)
	}
}

// R7: mistakes in Istio's configuration are refused with their place.
func TestMeshRefuses(t *testing.T) {
	for _, test := range []struct {
		mesh, annotation string
		want             []string
	}{
		{mesh: "defaultConfig: {proxyMetadata: {NAMETAP_DRIAN: 5s}}", want: []string{"mesh config /", "NAMETAP_DRIAN", "5s", "no such setting"}},
		{mesh: "defaultConfig: {proxyMetadata: {NAMETAP_DRAIN: 5}}", want: []string{"mesh config /", "NAMETAP_DRAIN", `"5"`, "unit"}},
		{mesh: "defaultConfig: [1]", want: []string{"mesh config /", "line 1"}},
		{mesh: "\t", want: []string{"mesh config /", ": not valid YAML: "}},
		{annotation: `{"proxyMetadata":{"NAMETAP_DRAIN":"soon"}}`, want: []string{"PROXY_CONFIG", "NAMETAP_DRAIN", "soon", "unit"}},
		{annotation: `{"proxyMetadata":`, want: []string{"PROXY_CONFIG: ", ": not valid YAML: "}},
		{annotation: "[]", want: []string{"PROXY_CONFIG: line 1: cannot unmarshal !!seq"}},
		{mesh: "a: b\ndefaultConfig: x\n", want: []string{".yaml: line 2: cannot unmarshal !!str `x`"}},
		{mesh: "defaultConfig:\n  proxyMetadata: {A: b\nmtlsPort: 1\n", want: []string{".yaml: line 2: not valid YAML: "}},
	} {
		var got values
		flags := declareMesh(&got)
		if err := flags.Parse([]string{"--mesh-config=" + write(t, test.mesh)}); err != nil {
			t.Fatal(err)
		}
		err := settings.Resolve(flags, []string{"PROXY_CONFIG=" + test.annotation})
		if err == nil {
			t.Errorf("%+v is accepted: %+v", test, got)
			continue
		}
		if strings.Contains(err.Error(), "struct") {
			t.Errorf("error %q names a type of Go", err)
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
	}
}

// The mesh config may be absent at its default place, but not where the flag names it.
func TestMeshMissing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mesh")
	var got values
	flags := declare(&got)
	flags.String(settings.MeshConfigFlag, path, "")
	if err := settings.Resolve(flags, nil); err != nil {
		t.Error(err)
	}
	if err := flags.Parse([]string{"--mesh-config=" + path}); err != nil {
		t.Fatal(err)
	}
	if err := settings.Resolve(flags, nil); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v does not name %s", err, path)
	}
}

// FuzzMeshConfig reads any text as an annotation; an error names its source.
func FuzzMeshConfig(f *testing.F) {
	f.Add(`{"proxyMetadata":{"NAMETAP_DRAIN":"3s","ISTIO_META_DNS_CAPTURE":"true"},"discoveryAddress":"istiod:15012"}`)
	f.Add("proxyMetadata: {NAMETAP_UPSTREAM: '192.0.2.1,192.0.2.2'}")
	f.Fuzz(func(t *testing.T, text string) {
		var got values
		flags := declareMesh(&got)
		if err := settings.Resolve(flags, []string{"PROXY_CONFIG=" + text}); err != nil && !strings.Contains(err.Error(), "PROXY_CONFIG") {
			t.Errorf("error %q does not name its source", err)
		}
	})
}
