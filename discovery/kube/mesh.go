package kube

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

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

// parseMesh parses the text of a MeshConfig. As in istiod, it converts the text to JSON first, so an unquoted "true"
// or "on" is no string.
func parseMesh(text string) (from meshConfig, err error) {
	encoded, err := yaml.YAMLToJSON([]byte(text))
	if err == nil {
		err = json.Unmarshal(encoded, &from)
	}
	return from, err
}

// reduceMesh returns the settings in a ConfigMap. A ConfigMap without the key of the settings sets nothing.
func reduceMesh(o *corev1.ConfigMap) *slim {
	s := newSlim(object.KindConfigMap, o)
	const field = "data." + meshKey
	from, err := parseMesh(o.Data[meshKey])
	if err != nil {
		s.fail(field, "%v", err)
		return s
	}
	mesh := &object.Mesh{RootNamespace: from.RootNamespace, ExportTo: from.DefaultServiceExportTo, ProxyMetadata: from.DefaultConfig.ProxyMetadata}
	s.object.Mesh = mesh
	if mesh.RootNamespace != "" && !object.IsLabel(mesh.RootNamespace) {
		s.fail(field+".rootNamespace", "want the name of a namespace, got %q", mesh.RootNamespace)
	}
	if _, err := object.NewExportTo(mesh.ExportTo, ""); err != nil {
		s.fail(field+".defaultServiceExportTo", "%v", err)
	}
	for i, from := range from.DiscoverySelectors {
		field := fmt.Sprintf("%s.discoverySelectors[%d]", field, i)
		if from == nil {
			s.fail(field, "want matchLabels or matchExpressions, got null")
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(from)
		if err != nil {
			s.fail(field, "%v", err)
			continue
		}
		mesh.Selectors = append(mesh.Selectors, selector.String())
	}
	return s
}
