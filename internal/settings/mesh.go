package settings

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/yamltext"
)

// MeshConfigFlag is the flag that names Istio's mesh config file. No file can set the flag. The mesh config may be
// absent unless the flag is set.
const MeshConfigFlag = "mesh-config"

// proxyConfigEnv holds the proxy.istio.io/config annotation of the pod.
const proxyConfigEnv = "PROXY_CONFIG"

// annotationField is the pflag annotation with the name of the ProxyConfig field that sets the flag.
const annotationField = "nametap/proxy-config"

// discoveryAddress is the one field of ProxyConfig that is a setting of nametap.
const discoveryAddress = "discoveryAddress"

// A proxyConfig is the part of Istio's ProxyConfig that nametap reads. Its fields may have their JSON names or their
// protobuf names, as with Istio.
type proxyConfig struct {
	DiscoveryAddress string
	ProxyMetadata    map[string]string
}

// UnmarshalYAML reads both names of each field; the JSON name wins.
func (c *proxyConfig) UnmarshalYAML(node *yaml.Node) error {
	var fields struct {
		DiscoveryAddress  string            `yaml:"discoveryAddress"`
		DiscoveryAddress2 string            `yaml:"discovery_address"`
		ProxyMetadata     map[string]string `yaml:"proxyMetadata"`
		ProxyMetadata2    map[string]string `yaml:"proxy_metadata"`
	}
	if err := node.Decode(&fields); err != nil {
		return err
	}
	c.DiscoveryAddress = cmp.Or(fields.DiscoveryAddress, fields.DiscoveryAddress2)
	c.ProxyMetadata = map[string]string{}
	maps.Copy(c.ProxyMetadata, fields.ProxyMetadata2)
	maps.Copy(c.ProxyMetadata, fields.ProxyMetadata)
	return nil
}

// fromProxyConfig sets the flags that the pod's annotation names.
func fromProxyConfig(flags *pflag.FlagSet, environ []string) error {
	config, err := readProxyConfig(environ)
	mistakes := []error{err}
	if err == nil {
		mistakes = config.apply(flags, proxyConfigEnv)
	}
	return inPlace("environment variable "+proxyConfigEnv+": ", mistakes)
}

func readProxyConfig(environ []string) (proxyConfig, error) {
	var config proxyConfig
	err := decode([]byte(variables(environ)[proxyConfigEnv]), &config)
	return config, err
}

// fromMeshConfig sets the flags that the mesh config names.
func fromMeshConfig(flags *pflag.FlagSet) error {
	config, path, err := readMeshConfig(flags)
	mistakes := []error{err}
	if err == nil {
		mistakes = config.apply(flags, "mesh config "+path)
	}
	return inPlace("mesh config "+path+": ", mistakes)
}

// readMeshConfig reads defaultConfig of the mesh config. The path is "" if no file is named.
func readMeshConfig(flags *pflag.FlagSet) (config proxyConfig, path string, err error) {
	flag := flags.Lookup(MeshConfigFlag)
	if flag == nil {
		return config, "", nil
	}
	path = flag.Value.String()
	if path == "" {
		return config, "", nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !flag.Changed {
		return config, path, nil
	}
	if err != nil {
		return config, path, err
	}
	var mesh struct {
		DefaultConfig  *proxyConfig `yaml:"defaultConfig"`
		DefaultConfig2 *proxyConfig `yaml:"default_config"`
	}
	err = decode(text, &mesh)
	if found := cmp.Or(mesh.DefaultConfig, mesh.DefaultConfig2); found != nil {
		config = *found
	}
	return config, path, err
}

// Metadata returns the variables whose names begin with one of the prefixes. environ wins
// over PROXY_CONFIG, PROXY_CONFIG over the mesh config. Call it after [Resolve].
func Metadata(flags *pflag.FlagSet, environ []string, prefixes ...string) (map[string]string, error) {
	mesh, path, err := readMeshConfig(flags)
	if err != nil {
		return nil, fmt.Errorf("mesh config %s: %w", path, err)
	}
	annotation, err := readProxyConfig(environ)
	if err != nil {
		return nil, fmt.Errorf("environment variable %s: %w", proxyConfigEnv, err)
	}
	found := map[string]string{}
	for _, values := range []map[string]string{mesh.ProxyMetadata, annotation.ProxyMetadata, variables(environ)} {
		for key, value := range values {
			begins := func(prefix string) bool { return strings.HasPrefix(key, prefix) }
			if value != "" && slices.ContainsFunc(prefixes, begins) {
				found[key] = value
			}
		}
	}
	return found, nil
}

// decode decodes a YAML document into a value, and ignores fields that the value does not have.
func decode(text []byte, value any) error {
	err := yaml.NewDecoder(bytes.NewReader(text)).Decode(value)
	if errors.Is(err, io.EOF) {
		return nil // an empty document sets nothing
	} else if err != nil {
		return yamltext.OneLine(err)
	}
	return nil
}

// apply sets the flags that are not set yet. The keys of ProxyMetadata are names of environment variables; most of them
// are not settings of nametap.
func (c *proxyConfig) apply(flags *pflag.FlagSet, source string) []error {
	values := maps.Clone(c.ProxyMetadata)
	var mistakes []error
	flags.VisitAll(func(flag *pflag.Flag) {
		if flag.Name != ConfigFlag && flag.Name != MeshConfigFlag {
			return
		}
		for _, key := range envs(flag) {
			delete(values, key)
		}
	})
	for _, err := range setAll(flags, values, func(string) string { return source }) {
		mistakes = append(mistakes, fmt.Errorf("proxyMetadata: %w", err))
	}
	flags.VisitAll(func(flag *pflag.Flag) {
		if !slices.Equal(flag.Annotations[annotationField], []string{discoveryAddress}) {
			return
		}
		if err := set(flags, flag, c.DiscoveryAddress, source); err != nil {
			mistakes = append(mistakes, fmt.Errorf("%s %q: %w", discoveryAddress, c.DiscoveryAddress, expected(flag, err)))
		}
	})
	return mistakes
}
