package fakekube

import (
	"encoding/json"
	"net/http"
	"path"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// istioGroup is the path of the group of Istio's custom resources.
const istioGroup = "/apis/networking.istio.io"

// A Version is one of the group of Istio's custom resources.
type Version struct {
	Name      string
	Resources []string // that the API server says it has
}

// SetVersions sets the versions that the API server says it serves, the preferred one first. It has objects
// of version v1 only.
func (a *API) SetVersions(versions ...Version) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.versions = versions
}

// serveVersions answers a request for the versions of the group, or for the resources of one.
func (a *API) serveVersions(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	group := metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: path.Base(istioGroup)}
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}}
	for _, version := range a.versions {
		group.Versions = append(group.Versions, metav1.GroupVersionForDiscovery{GroupVersion: group.Name + "/" + version.Name, Version: version.Name})
		if path.Base(r.URL.Path) != version.Name {
			continue
		}
		for _, name := range version.Resources {
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name})
		}
	}
	if len(group.Versions) > 0 {
		group.PreferredVersion = group.Versions[0]
	}
	if r.URL.Path == istioGroup {
		_ = json.NewEncoder(w).Encode(group) // the client may have left
		return
	}
	_ = json.NewEncoder(w).Encode(list) // the client may have left
}
