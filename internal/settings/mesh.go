package settings

import (
	"bytes"
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
)

// MeshConfigFlag is the flag that names Istio's mesh config file. It is never taken
// from a file. The file may be absent unless the flag is set.
const MeshConfigFlag = "mesh-config"

// proxyConfigEnv holds the proxy.istio.io/config annotation of the pod.
const proxyConfigEnv = "PROXY_CONFIG"

// annotationField is the flag annotation that holds a field of Istio's ProxyConfig.
const annotationField = "nametap/proxy-config"

// discoveryAddress is the one field of ProxyConfig that is a setting of ours.
const discoveryAddress = "discoveryAddress"

// SetDiscoveryAddress says that Istio's discoveryAddress is this flag. It panics if
// flags has no such flag, which is a programmer's mistake.
func SetDiscoveryAddress(flags *pflag.FlagSet, flag string) {
	if err := flags.SetAnnotation(flag, annotationField, []string{discoveryAddress}); err != nil {
		panic(err)
	}
}

// A proxyConfig is what we read of Istio's ProxyConfig.
type proxyConfig struct {
	DiscoveryAddress string            `yaml:"discoveryAddress"`
	ProxyMetadata    map[string]string `yaml:"proxyMetadata"`
}

// fromProxyConfig takes what the pod's annotation says.
func fromProxyConfig(flags *pflag.FlagSet, environ []string) error {
	prefix := proxyConfigEnv + "="
	i := slices.IndexFunc(environ, func(variable string) bool { return strings.HasPrefix(variable, prefix) })
	if i < 0 {
		return nil
	}
	var config proxyConfig
	err := decode([]byte(environ[i][len(prefix):]), &config)
	if err == nil {
		err = config.apply(flags, proxyConfigEnv)
	}
	if err != nil {
		return fmt.Errorf("environment variable %s: %w", proxyConfigEnv, err)
	}
	return nil
}

// fromMeshConfig takes what the mesh says for all of its proxies.
func fromMeshConfig(flags *pflag.FlagSet) error {
	flag := flags.Lookup(MeshConfigFlag)
	if flag == nil || flag.Value.String() == "" {
		return nil
	}
	path := flag.Value.String()
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !flag.Changed {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the mesh config: %w", err)
	}
	var mesh struct {
		DefaultConfig proxyConfig `yaml:"defaultConfig"`
	}
	err = decode(text, &mesh)
	if err == nil {
		err = mesh.DefaultConfig.apply(flags, "mesh config "+path)
	}
	if err != nil {
		return fmt.Errorf("mesh config %s: %w", path, err)
	}
	return nil
}

// decode reads a YAML document, of which other fields are for others.
func decode(text []byte, into any) error {
	err := yaml.NewDecoder(bytes.NewReader(text)).Decode(into)
	if errors.Is(err, io.EOF) {
		return nil // an empty one sets nothing
	}
	return err
}

// apply sets the flags that nothing before has set. Metadata has the names of
// environment variables; most are for other proxies.
func (c *proxyConfig) apply(flags *pflag.FlagSet, source string) error {
	byEnv := environmentNames(flags)
	for _, key := range slices.Sorted(maps.Keys(c.ProxyMetadata)) {
		value, flag := c.ProxyMetadata[key], byEnv[key]
		switch {
		case flag == nil && strings.HasPrefix(key, Prefix):
			return fmt.Errorf("proxyMetadata: %s=%q: no such setting; `--help` lists them", key, value)
		case flag == nil || flag.Name == ConfigFlag || flag.Name == MeshConfigFlag:
			continue
		}
		if err := set(flags, flag, value, source); err != nil {
			return fmt.Errorf("proxyMetadata: %s=%q: %w", key, value, Expected(flag, err))
		}
	}
	var err error
	flags.VisitAll(func(flag *pflag.Flag) {
		if slices.Equal(flag.Annotations[annotationField], []string{discoveryAddress}) {
			err = errors.Join(err, set(flags, flag, c.DiscoveryAddress, source))
		}
	})
	return err
}
