// Package kube follows the objects of a Kubernetes API server: Services, the EndpointSlices of
// headless Services, Istio's ServiceEntries and Sidecars, and the settings of the mesh.
//
// Objects, in the order in which the files use each other:
//
//  1. source.go combines the feeds, one for each resource. Until each feed has all of its objects,
//     [Source.Waiting] says which resources are missing.
//  2. crd.go asks the API server which custom resources it serves, and follows these. One that is not served is no
//     error: crd.go asks again.
//  3. feed.go holds the objects of one resource. client-go's Reflector lists and watches the resource, as a
//     stream if the API server can, and passes each object to the feed as soon as the object is decoded. follow.go
//     lists the resource again after at most 10 min.
//  4. selection.go applies the discovery selectors of the mesh: only objects in the namespaces that they select count.
//     A feed drops the objects of other namespaces before it reduces them. When such a namespace counts later, the feed
//     lists its resource again.
//  5. decode.go reduces an object to the fields of package object as soon as it comes (slim.go), so no whole object is
//     kept. mesh.go reduces the ConfigMap with the settings of the mesh.
//  6. resources.go lists and watches resources, with selectors. Pods are not read: EndpointSlices
//     have their hostnames. Endpoints of Services with a ClusterIP are not read either: they do not
//     change a table.
//
// While the API server cannot be reached, the objects do not change.
//
// clustersecrets.go, namespaces.go and selection.go read objects through a mirror (mirror.go), which holds a part of each
// object. pace.go has the pauses between failed requests.
//
// access.go finds the API server. review.go asks it to review a client's token.
package kube
