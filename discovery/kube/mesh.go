package kube

import (
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
)

// The ConfigMap with the settings of the mesh, as Istio's installation makes it.
const (
	meshName = "istio"
	meshKey  = "mesh"
)

// meshConfig has the fields of Istio's MeshConfig that are used.
type meshConfig struct {
	RootNamespace          string                  `json:"rootNamespace"`
	DefaultServiceExportTo []string                `json:"defaultServiceExportTo"`
	DiscoverySelectors     []*metav1.LabelSelector `json:"discoverySelectors"`
	DefaultConfig          struct {
		ProxyMetadata map[string]string `json:"proxyMetadata"`
	} `json:"defaultConfig"`
}

// readMesh reads the ConfigMap with the settings. A ConfigMap without the key of the settings sets nothing.
func readMesh(data []byte) reading[object.Object] {
	var from struct {
		Metadata decode.Meta       `json:"metadata"`
		Data     map[string]string `json:"data"`
	}
	if err := json.Unmarshal(data, &from); err != nil {
		return reading[object.Object]{from.Metadata, nil, []object.Error{decode.Mismatch(err, "")}}
	}
	key := object.Key{Kind: object.KindConfigMap, Namespace: from.Metadata.Namespace, Name: from.Metadata.Name}
	var errs []object.Error
	fail := func(field, format string, args ...any) {
		errs = object.AppendError(errs, object.Error{Object: key, Field: "data." + meshKey + field, Msg: fmt.Sprintf(format, args...)})
	}
	mesh := newMesh(from.Data[meshKey], fail)
	if len(errs) > 0 {
		return reading[object.Object]{from.Metadata, nil, errs}
	}
	return reading[object.Object]{meta: from.Metadata, value: &object.Object{Key: key, Mesh: mesh}}
}

// newMesh returns the settings in a text. It calls fail with what is wrong with them.
func newMesh(text string, fail func(field, format string, args ...any)) *object.Mesh {
	var from meshConfig
	encoded, err := yaml.YAMLToJSON([]byte(text)) // as in istiod, so an unquoted "true" or "on" is no string
	if err == nil {
		err = json.Unmarshal(encoded, &from)
	}
	if err != nil {
		fail("", "%v", err)
	}
	mesh := &object.Mesh{RootNamespace: from.RootNamespace, ExportTo: from.DefaultServiceExportTo, ProxyMetadata: from.DefaultConfig.ProxyMetadata}
	if mesh.RootNamespace != "" && !object.IsLabel(mesh.RootNamespace) {
		fail(".rootNamespace", "want the name of a namespace, got %q", mesh.RootNamespace)
	}
	if _, err := object.NewExportTo(mesh.ExportTo, ""); err != nil {
		fail(".defaultServiceExportTo", "%v", err)
	}
	for i, from := range from.DiscoverySelectors {
		field := fmt.Sprintf(".discoverySelectors[%d]", i)
		if from == nil {
			fail(field, "want matchLabels or matchExpressions, got null")
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(from)
		if err != nil {
			fail(field, "%v", err)
			continue
		}
		mesh.Selectors = append(mesh.Selectors, selector.String())
	}
	return mesh
}
