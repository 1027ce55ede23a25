package fakekube

import (
	"encoding/json"
	"net/http"
	"path"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The paths of the groups of custom resources.
const (
	istioGroup        = "/apis/networking.istio.io"
	multiClusterGroup = "/apis/multicluster.x-k8s.io"
)

// A Version is a version of a group of custom resources.
type Version struct {
	Name      string
	Resources []string // resources that the API server says it has
}

// SetVersions sets the versions of Istio's group that the API server says it serves, the preferred one
// first. The API server has objects of version v1 only.
func (a *API) SetVersions(versions ...Version) { a.setVersions(istioGroup, versions) }

// SetMultiClusterVersions sets the versions of the group of the Multi-Cluster Services API. The API server
// has objects of the versions v1alpha1 and v1beta1.
func (a *API) SetMultiClusterVersions(versions ...Version) {
	a.setVersions(multiClusterGroup, versions)
}

func (a *API) setVersions(group string, versions []Version) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.versions[group] = versions
}

// groupOf returns the group of a path. The path names the group, or one of the group's versions.
func (a *API) groupOf(requestPath string) (group string, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, group := range []string{requestPath, path.Dir(requestPath)} {
		if _, ok := a.versions[group]; ok && len(a.objects[Definitions]) > 0 {
			return group, true
		}
	}
	return "", false
}

// serveVersions answers a request for the versions of a group, or for the resources of one of its versions.
func (a *API) serveVersions(w http.ResponseWriter, r *http.Request, groupPath string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	group := metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: path.Base(groupPath)}
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}}
	for _, version := range a.versions[groupPath] {
		group.Versions = append(group.Versions, metav1.GroupVersionForDiscovery{GroupVersion: group.Name + "/" + version.Name, Version: version.Name})
		if path.Base(r.URL.Path) != version.Name {
			continue
		}
		for _, name := range version.Resources {
			if a.undefinedLocked(r.URL.Path + "/" + name) {
				continue
			}
			list.APIResources = append(list.APIResources, metav1.APIResource{Name: name})
		}
	}
	if len(group.Versions) > 0 {
		group.PreferredVersion = group.Versions[0]
	}
	if r.URL.Path == groupPath {
		_ = json.NewEncoder(w).Encode(group) // the client may have left
		return
	}
	_ = json.NewEncoder(w).Encode(list) // the client may have left
}

// undefinedLocked reports whether a path is one of a custom resource without a definition.
func (a *API) undefinedLocked(resource string) bool {
	group := path.Dir(path.Dir(resource))
	_, custom := a.versions[group]
	return custom && a.objects[Definitions]["/"+path.Base(resource)+"."+path.Base(group)] == nil
}
