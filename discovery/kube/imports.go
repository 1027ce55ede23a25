package kube

import (
	"fmt"
	"net/netip"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/nametap/nametap/discovery/object"
)

// serviceImport has the fields of a ServiceImport of the Multi-Cluster Services API that are used. They
// are the same in v1alpha1 and v1beta1.
type serviceImport struct {
	Spec struct {
		Type  string   `json:"type"`
		IPs   []string `json:"ips"`
		Ports []struct {
			Name     string `json:"name"`
			Protocol string `json:"protocol"`
			Port     int32  `json:"port"`
		} `json:"ports"`
	} `json:"spec"`
}

func reduceImport(o *unstructured.Unstructured) *slim {
	s := newSlim(object.KindServiceImport, o)
	var from serviceImport
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &from); err != nil {
		s.fail("spec", "%v", err)
		return s
	}
	imported := &object.ServiceImport{Headless: from.Spec.Type == object.ImportHeadless}
	s.object.Import = imported
	if !imported.Headless && from.Spec.Type != object.ImportClusterSetIP {
		s.fail("spec.type", "want %s or %s, got %q", object.ImportClusterSetIP, object.ImportHeadless, from.Spec.Type)
	}
	for i, text := range from.Spec.IPs {
		a, err := netip.ParseAddr(text)
		if err != nil {
			s.fail(fmt.Sprintf("spec.ips[%d]", i), "want an IP address, got %q", text)
			continue
		}
		imported.IPs = append(imported.IPs, a.Unmap())
	}
	var ports []object.Port
	for i, p := range from.Spec.Ports {
		ports = s.addPort(ports, fmt.Sprintf("spec.ports[%d]", i), object.Port{Name: p.Name, Protocol: p.Protocol}, p.Port)
	}
	imported.Ports = object.NewPorts(ports)
	return s
}
