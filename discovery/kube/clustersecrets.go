package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"time"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// clusterSecrets selects the Secrets with kubeconfigs of other clusters, as istioctl writes them.
const clusterSecrets = "istio/multiCluster=true"

// A ClusterSecret is a Secret with kubeconfigs of other clusters.
type ClusterSecret struct {
	Namespace, Name string
	Created         time.Time
	Kubeconfigs     map[string][]byte // by the name of the cluster
}

// ClusterSecrets follows the Secrets with kubeconfigs of other clusters. Make one with
// [NewClusterSecrets], and call Run once.
type ClusterSecrets struct {
	store *store[ClusterSecret]
}

// NewClusterSecrets returns the Secrets of a namespace. The function changed is called after each change, from any
// goroutine. It must not block.
func NewClusterSecrets(access *Access, namespace string, changed func(), log *slog.Logger) *ClusterSecrets {
	r := resource{client: access.client, name: "secrets of other clusters", kind: "Secret", path: "/api/v1/namespaces/" + namespace + "/secrets", labels: clusterSecrets}
	return &ClusterSecrets{newStore(r, log, changed, readSecret)}
}

// readSecret reads a Secret.
func readSecret(data []byte) reading[ClusterSecret] {
	var from struct {
		Metadata decode.Meta       `json:"metadata"`
		Data     map[string][]byte `json:"data"`
	}
	if err := json.Unmarshal(data, &from); err != nil {
		return reading[ClusterSecret]{from.Metadata, nil, []object.Error{decode.Mismatch(err, "")}}
	}
	m := from.Metadata
	return reading[ClusterSecret]{meta: m, value: &ClusterSecret{m.Namespace, m.Name, m.Created(), from.Data}}
}

// String returns "Secret NAMESPACE/NAME".
func (s ClusterSecret) String() string { return "Secret " + s.Namespace + "/" + s.Name }

// Run follows the Secrets until ctx ends. All its goroutines have ended when it returns.
func (c *ClusterSecrets) Run(ctx context.Context) {
	c.store.run(ctx)
}

// All returns the Secrets, the oldest first; ok is false until all were read once.
func (c *ClusterSecrets) All() (all []ClusterSecret, ok bool) {
	values, ok := c.store.all()
	for _, s := range values {
		all = append(all, *s)
	}
	slices.SortFunc(all, func(a, b ClusterSecret) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all, ok
}

// Status returns the state of the resource.
func (c *ClusterSecrets) Status() source.Status { return c.store.status() }
