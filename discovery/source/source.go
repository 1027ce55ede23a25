// Package source has the interfaces between the control plane and the sources of objects. The control plane has a list
// of [Source], and an [API] for everything else that it needs of an API server. Only the packages discovery/clusters
// and discovery/kube link Kubernetes' client library, so a program that only reads files does not have it.
package source

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// A Source follows objects. After each change it calls a function of its configuration, from any
// goroutine; the function must not block. Call Run once.
type Source interface {
	// Name is the name of the source in logs, such as "the Kubernetes API".
	Name() string
	// Run follows the objects until ctx ends. All its goroutines have ended when it returns.
	Run(ctx context.Context)
	// Read returns what has changed since the last call. It must not be called by two goroutines at a
	// time. The caller must not change the objects.
	Read() Reading
	// Status returns the state of each resource that the source reads at an API server.
	Status() []Status
}

// A Reading has the changes of a [Source], and its current state.
type Reading struct {
	// Changes are the changes since the last reading. In the changes of the own cluster, the field Source is 0. The
	// control plane then sets it to the number of the source.
	Changes []hosts.Change
	Errors  []object.Error // all current errors, sorted; not to be changed
	Notes   []string       // why objects without errors make no host, sorted
	Kept    int            // number of objects in use in their last good form
	// Waiting is the reason why this reading must not be the first one that is served. If it is "" and Read is set, this
	// reading may be the first.
	Waiting string
	// Read is set once all objects were read, or once reading has failed in a way that will not end
	// soon. Streams wait until Read is set, but not for long.
	Read bool
	// Missing has the clusters that have no objects in use, by name, with the reason.
	Missing map[string]string
}

// An API is an API server. Its methods make what the control plane needs of the API server.
type API interface {
	// NewObjects returns the objects of the API server.
	NewObjects(cfg ObjectsConfig) Source
	// NewClusters returns the objects of other clusters, whose kubeconfigs are in Secrets.
	NewClusters(cfg ClustersConfig) Clusters
	// Reviewer returns a function that asks the API server to which account a token belongs (TokenReview). The function
	// refuses a token for another audience.
	Reviewer(audience string) auth.Review
	// Namespace returns the labels and annotations of a namespace. It is the only method that sends a request.
	Namespace(ctx context.Context, name string) (labels, annotations map[string]string, err error)
}

// ObjectsConfig configures the objects of an API server, see [API.NewObjects].
type ObjectsConfig struct {
	// Cluster is the name of the API server's cluster; empty for the control plane's own cluster. Istio's custom
	// resources are not read from other clusters: as in istiod, they are settings of the mesh.
	Cluster string
	// RootNamespace is the namespace of the ConfigMap with the settings of the mesh. "" means that the settings are
	// not read, so all namespaces count. The settings are not read from other clusters, see [Clusters.Select].
	RootNamespace string
	// Selected is called with the discovery selectors of the mesh when they become known, and when they
	// have changed. It must not block. It may be nil.
	Selected func(selectors []string)
	// NetworkOf is the namespace whose label names the network of the cluster; empty if the network is not read.
	NetworkOf string
	// Changed is called after each change of the objects, from any goroutine. It must not block.
	Changed func()
	// Logger is for logs.
	Logger *slog.Logger
}

// Status is the state of one resource.
type Status struct {
	Cluster  string `json:"cluster,omitempty"` // empty for the control plane's own cluster
	Resource string `json:"resource"`
	Objects  int    `json:"objects"`
	// Synced is true if all objects were read once, or if the API server does not have the
	// resource.
	Synced bool `json:"synced"`
	// Heard is when a request for the resource last succeeded; the zero time if never.
	Heard time.Time `json:"heard"`
	// Failure is why requests to the API server have failed since FailingSince; "" if they succeed.
	Failure      string    `json:"failure,omitempty"`
	FailingSince time.Time `json:"failingSince,omitzero"`
}

// Waiting returns why not all objects of the resource were read yet, or an empty string.
func (s Status) Waiting() string {
	switch {
	case s.Synced:
		return ""
	case s.Failure != "":
		return s.Resource + " cannot be read: " + s.Failure
	}
	return s.Resource + " are being read"
}

// ClustersConfig configures [Clusters].
type ClustersConfig struct {
	// Namespace is the namespace of the Secrets.
	Namespace string
	// RootNamespace is a namespace in each cluster. One of its labels names the cluster's network.
	RootNamespace string
	// Own is the name of the own cluster. No Secret may name it.
	Own string
	// TokenAudience is the audience of the tokens that clients of the clusters have.
	TokenAudience string
	// Wait is how long [Reading.Waiting] names a cluster that has no objects in use yet. The time begins when a Secret
	// first names the cluster.
	Wait time.Duration
	// Changed is called after each change, from any goroutine. It must not block.
	Changed func()
	// Logger is for logs.
	Logger *slog.Logger
}

// Clusters follows the clusters that Secrets name.
type Clusters interface {
	Source
	// Select sets the discovery selectors of the mesh, in the form of kubectl's --selector. Until then no
	// object is read.
	Select(selectors []string)
	// Tokens returns the [auth.Tokens] for which the API server of a cluster makes the reviews; nil if there is no such
	// cluster.
	Tokens(cluster string) *auth.Tokens
}

// An Outbox passes the readings of a [Source] from its goroutine to the control plane.
type Outbox struct {
	// Changed is called after every change. It must not block.
	Changed func()

	mu      sync.Mutex
	reading Reading // with all changes since the last Read
}

// Put makes r the current reading, and appends its changes to the earlier ones. It calls
// Changed if anything is new.
func (o *Outbox) Put(r Reading) {
	o.mu.Lock()
	last := o.reading
	o.reading = r
	o.reading.Changes = append(last.Changes, r.Changes...)
	o.mu.Unlock()
	last.Changes = nil
	if len(r.Changes) > 0 || !reflect.DeepEqual(last, r) {
		o.Changed()
	}
}

// Read returns the current reading, with the changes since the last call.
func (o *Outbox) Read() Reading {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.reading
	o.reading.Changes = nil
	return r
}
