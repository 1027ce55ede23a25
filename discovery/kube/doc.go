// Package kube follows the objects of a Kubernetes API server: Services, the EndpointSlices of
// headless Services, Istio's ServiceEntries and Sidecars, and the settings of the mesh.
//
// The API server sends JSON, also of built-in types. So package decode decodes the objects of files and of the API
// server alike, and no whole object is kept.
//
// Files, in the order in which they use each other:
//
//  1. source.go combines the stores of objects, one for each resource. Until each store has all of its objects,
//     [Source.Waiting] says which resources are missing. clustersecrets.go has a store of its own.
//  2. selection.go applies the discovery selectors of the mesh: only objects in the namespaces that they select count.
//     A store drops the objects of other namespaces. When such a namespace counts later, the store lists its resource
//     again.
//  3. follow.go runs client-go's Reflector, which lists and watches a resource, as a stream if the API server can. It
//     lists the resource again after at most 10 min. It asks the API server which custom resources it serves; one that
//     is not served is no error, and is asked for again.
//  4. store.go holds a value for each object of a resource. It decodes each object as soon as it comes.
//  5. resources.go lists and watches resources, with selectors. Pods are not read: EndpointSlices
//     have their hostnames. Endpoints of Services with a ClusterIP are not read either: they do not
//     change a table.
//  6. mesh.go reads the ConfigMap with the settings of the mesh.
//
// While the API server cannot be reached, the objects do not change.
//
// access.go finds the API server, and asks it to review a client's token, and for the namespace of a pod.
package kube
