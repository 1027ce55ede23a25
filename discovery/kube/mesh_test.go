package kube_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// mesh returns the ConfigMap with settings of the mesh.
func mesh(settings ...string) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata:\n  mesh: |\n    " +
		strings.Join(settings, "\n    ") + "\n  meshNetworks: 'networks: {}'\n"
}

// settings returns the settings of the mesh in a reading; nil if there are none.
func (r reading) settings() *object.Mesh {
	for _, o := range r.Objects {
		if o.Mesh != nil {
			return o.Mesh
		}
	}
	return nil
}

// D11, D18: the settings of the mesh come from the ConfigMap. A broken one is named, and its last
// good form stays.
func TestMeshSettings(t *testing.T) {
	a := fakekube.Start(t)
	a.Put(fakekube.ConfigMaps, strings.Replace(mesh("rootNamespace: elsewhere"), "name: istio,", "name: another,", 1))
	s := start(t, a)
	s.want()
	want := func(mesh object.Mesh, errors ...string) {
		t.Helper()
		var got reading
		diff := "nothing was read"
		defer func() {
			if diff != "" {
				t.Errorf("settings and errors (-want +got):\n%s", diff)
			}
		}()
		wait.Until(t, "the settings are in use", func() bool {
			got = s.Read()
			var texts []string
			for _, e := range got.Errors {
				texts = append(texts, fmt.Sprint(e, " ", e.Kept))
			}
			diff = cmp.Diff(&mesh, got.settings()) + cmp.Diff(errors, texts)
			return diff == ""
		})
	}
	a.Put(fakekube.ConfigMaps, mesh("defaultServiceExportTo: ['bad scope']"))
	wait.Until(t, "the broken settings are named", func() bool { return len(s.Read().Errors) == 1 })
	s.want()
	a.Put(fakekube.ConfigMaps, mesh("trustDomain: mesh.example", "defaultConfig: {discoveryAddress: 'x:15012', proxyMetadata: {A: b}}"))
	want(object.Mesh{ProxyMetadata: map[string]string{"A": "b"}})
	a.Put(fakekube.ConfigMaps, mesh(
		"rootNamespace: root", "defaultServiceExportTo: ['.', shop]", "discoverySelectors:",
		"- matchLabels: {mesh: enabled}", "- matchExpressions: [{key: team, operator: In, values: [b, a]}, {key: mesh, operator: Exists}]", "- {}"))
	good := object.Mesh{RootNamespace: "root", ExportTo: []string{".", "shop"}, Selectors: []string{"mesh=enabled", "mesh,team in (a,b)", ""}}
	want(good)
	for text, message := range map[string]string{
		"rootNamespace: [a": `: yaml: line 1: did not find expected ',' or ']'`,
		"discoverySelectors: [{matchLabels: {mesh: on}}]": `: json: cannot unmarshal bool into Go struct field LabelSelector.discoverySelectors.matchLabels of type string`,
		"rootNamespace: {a: b}":                           `: json: cannot unmarshal object into Go struct field meshConfig.rootNamespace of type string`,
		"rootNamespace: a b":                              `.rootNamespace: want the name of a namespace, got "a b"`,
		"defaultServiceExportTo: ['!']":                   `.defaultServiceExportTo: want namespaces, ".", "*" or "~", got "!"`,
		"discoverySelectors: [null]":                      `.discoverySelectors[0]: want matchLabels or matchExpressions, got null`,
		"discoverySelectors: [{}, {matchExpressions: [{key: a, operator: Is}]}]": `.discoverySelectors[1]: "Is" is not a valid label selector operator`,
	} {
		a.Put(fakekube.ConfigMaps, mesh(text))
		want(good, "ConfigMap istio-system/istio: data.mesh"+message+" true")
	}
	a.Put(fakekube.ConfigMaps, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\n")
	want(object.Mesh{})
	a.Remove(fakekube.ConfigMaps, "istio-system/istio")
	s.want()
}

// D18: settings that are broken from the start are named, and nothing is served, since they may hide hosts.
func TestMeshSettingsBrokenAtStart(t *testing.T) {
	a := fakekube.Start(t)
	a.Put(fakekube.ConfigMaps, mesh("defaultServiceExportTo: ['.', '!']", "discoverySelectors: [{matchLabels: {mesh: enabled}}]"))
	a.Put(fakekube.Services, service("web", "10.96.0.1"))
	s := start(t, a)
	wait.Until(t, "the settings are named", func() bool {
		r := s.Read()
		return len(r.Objects) == 0 && len(r.Errors) == 1 && !r.Errors[0].Kept &&
			strings.Contains(r.Waiting, "settings of the mesh cannot be read: ConfigMap istio-system/istio: data.mesh.defaultServiceExportTo: ")
	})
	a.Put(fakekube.ConfigMaps, mesh("defaultServiceExportTo: ['.']"))
	s.want("ConfigMap istio-system/istio", "Service shop/web")
}

// D18: settings that are broken from the start and are deleted hide nothing any more.
func TestBrokenMeshSettingsDeleted(t *testing.T) {
	a := fakekube.Start(t)
	a.Put(fakekube.ConfigMaps, mesh("defaultServiceExportTo: ['!']"))
	s := start(t, a)
	wait.Until(t, "the settings are named", func() bool { return len(s.Read().Errors) == 1 })
	if why := s.Read().Waiting; why == "" {
		t.Error("the source does not wait for settings that can be used")
	}
	a.Remove(fakekube.ConfigMaps, "istio-system/istio")
	s.want()
}
