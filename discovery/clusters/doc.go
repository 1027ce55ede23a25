// Package clusters follows clusters other than the control plane's own one. The API server of the
// own cluster has Secrets with a kubeconfig for each of these clusters.
//
//  1. clusters.go follows each cluster for as long as a Secret names it, and publishes what has changed in any of
//     them.
//  2. remote.go follows the objects of one cluster, with a [kube.Source] for its API server. With new credentials it reads
//     all objects again.
//  3. wanted.go finds the clusters that the Secrets name, and the errors in the Secrets.
//
// The objects of a cluster are used when all of them were read, and stay in use until the cluster's Secret is removed.
// While the cluster's API server cannot be reached, the objects do not change.
package clusters
