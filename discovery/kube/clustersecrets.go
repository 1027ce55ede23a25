package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

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
	lister lister
	mirror *mirror[ClusterSecret]
}

// NewClusterSecrets returns the Secrets of a namespace. The function changed is called after each change, from any
// goroutine. It must not block.
func NewClusterSecrets(access *Access, namespace string, changed func(), log *slog.Logger) (*ClusterSecrets, error) {
	c, err := newClients(access.config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	return &ClusterSecrets{
		lister: requestLister(&corev1.Secret{}, func(options metav1.ListOptions) *rest.Request {
			options.LabelSelector = clusterSecrets
			return c.core.Get().Resource("secrets").Namespace(namespace).VersionedParams(&options, metav1.ParameterCodec)
		}),
		mirror: newMirror("secrets of other clusters", log, changed, clusterSecretOf),
	}, nil
}

func clusterSecretOf(o metav1.Object) ClusterSecret {
	s := ClusterSecret{Namespace: o.GetNamespace(), Name: o.GetName(), Created: o.GetCreationTimestamp().Time}
	if whole, ok := o.(*corev1.Secret); ok {
		s.Kubeconfigs = whole.Data
	}
	return s
}

// String returns "Secret NAMESPACE/NAME".
func (s ClusterSecret) String() string { return "Secret " + s.Namespace + "/" + s.Name }

// Run follows the Secrets until ctx ends. All its goroutines have ended when it returns.
func (c *ClusterSecrets) Run(ctx context.Context) {
	syncStore(ctx, c.lister, c.mirror, &c.mirror.health)
}

// All returns the Secrets, the oldest first; ok is false until all were read once.
func (c *ClusterSecrets) All() (all []ClusterSecret, ok bool) {
	parts, ok := c.mirror.all()
	return slices.SortedFunc(maps.Values(parts), func(a, b ClusterSecret) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}), ok
}

// Waiting returns why the Secrets were not read yet, or "" if they were.
func (c *ClusterSecrets) Waiting() string { return c.Status().Waiting() }

// Status returns the state of the resource.
func (c *ClusterSecrets) Status() source.Status { return c.mirror.status() }
