package clusters

import (
	"fmt"
	"maps"
	"slices"

	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/object"
)

// maxName is the length of the longest name of a cluster.
const maxName = 200

// wanted is a cluster that a Secret names.
type wanted struct {
	secret     kube.ClusterSecret
	kubeconfig []byte
}

// wantedClusters returns the clusters that Secrets name, and the errors in the Secrets. The Secrets must be sorted by
// age, the oldest first. If two Secrets name the same cluster, the older Secret counts. ownName is the name of the own
// cluster.
func wantedClusters(secrets []kube.ClusterSecret, ownName string) (map[string]wanted, []object.Error) {
	all := map[string]wanted{}
	var errs []object.Error
	for _, secret := range secrets {
		for _, name := range slices.Sorted(maps.Keys(secret.Kubeconfigs)) {
			first, taken := all[name]
			problem := ""
			switch {
			case name == ownName:
				problem = name + " is this control plane's own cluster (--cluster-id)"
			case len(name) > maxName:
				problem = fmt.Sprintf("want a name of at most %d characters, got %d", maxName, len(name))
			case taken:
				problem = fmt.Sprintf("the cluster %s is already in %s, which is older; this one is ignored", name, first.secret)
			default:
				all[name] = wanted{secret, secret.Kubeconfigs[name]}
				continue
			}
			errs = append(errs, secretError(secret, name, problem))
		}
	}
	return all, errs
}

// secretError returns an error in the kubeconfig of a cluster.
func secretError(secret kube.ClusterSecret, cluster, problem string) object.Error {
	return object.Error{File: secret.String(), Field: "data." + cluster, Msg: problem}
}
