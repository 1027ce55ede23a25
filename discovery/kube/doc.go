// Package kube follows the objects of a Kubernetes API server: Services, the EndpointSlices of
// headless Services, Istio's ServiceEntries and Sidecars, and the settings of the mesh.
//
// Objects, in the order in which the files use each other:
//
//  1. source.go combines the feeds. Until each of them has all of its objects, the reading says
//     what it waits for.
//  2. crd.go follows the definitions of custom resources: one that is missing is no error, and
//     one that is installed later is read then.
//  3. feed.go holds the objects of one resource. client-go's Reflector lists and watches it, as a
//     stream if the API server can, and passes each object on as soon as it is decoded. follow.go lists
//     it again when no watch confirms what the feed has.
//  4. selection.go follows which namespaces count, by the discovery selectors of the mesh. A feed drops
//     the objects of other namespaces before it reduces them. When such a namespace counts later, the
//     feed lists its resource again.
//  5. decode.go reduces an object to the fields of package object at once (slim.go), so the whole object is
//     never held. mesh.go does so for the ConfigMap with the settings of the mesh.
//  6. resources.go lists and watches resources, with selectors. Pods are not read: EndpointSlices
//     have their hostnames. Endpoints of Services with a ClusterIP are not read either: they do not
//     change a table.
//
// While the API server is away, the objects stay as they were.
//
// certificate.go keeps the certificate that replicas share (package pki) in a Secret, publisher.go its root
// certificate in ConfigMaps, and bundle.go in a webhook. pace.go has when they try again, and how often the latter two
// write what another program writes, too. All see the objects of the API server in a mirror.go, and ask it by shared.go.
// clustersecrets.go and namespaces.go have mirrors, too.
//
// vips.go writes the status of ServiceEntries while its replica holds the lease of lease.go.
//
// access.go finds the API server, review.go asks it whose a client's token is, and clock.go asks it what time it is.
package kube
