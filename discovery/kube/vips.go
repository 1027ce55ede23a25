package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/logonce"
)

const (
	// writeEvery bounds how often the VIPs are compared with the status of all ServiceEntries.
	writeEvery = time.Second
	// writeAgain is how long the Writer waits before it tries again, if a write has failed or istiod's controller writes
	// the VIPs.
	writeAgain = 15 * time.Second
)

// istiod's controller of automatic VIPs holds its lock in an annotation of a ConfigMap.
const (
	istiodLock         = "istio-ip-autoallocate"
	istiodLockHolder   = "control-plane.alpha.kubernetes.io/leader"
	istiodLockDuration = time.Minute // twice what istiod sets
)

// A Writer writes automatic VIPs to the status of ServiceEntries while it holds a Lease, unless istiod writes them.
// Make one with [Access.NewWriter].
type Writer struct {
	cfg      source.WriterConfig
	clients  *clients
	election election
	failure  logonce.Failure // why VIPs are not written; owned by the goroutine of writeLoop
}

// NewWriter returns the writer of automatic VIPs.
func (a *Access) NewWriter(cfg source.WriterConfig) (source.Writer, error) {
	c, err := newClients(a.config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API (--kubeconfig): %w", err)
	}
	leases, err := typedClient(a.config, coordinationv1.SchemeGroupVersion, coordinationv1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API (--kubeconfig): %w", err)
	}
	return &Writer{cfg: cfg, clients: c, election: election{
		name: cfg.Lease, identity: cfg.Identity, leases: leases, times: writerLease, log: cfg.Logger,
	}}, nil
}

// Holds reports whether this process holds the Lease.
func (w *Writer) Holds() bool { return w.election.holds.Load() }

// Run tries to get the Lease, and writes while it holds the Lease. When ctx ends, it gives the Lease back.
func (w *Writer) Run(ctx context.Context) { w.election.run(ctx, w.writeLoop) }

// writeLoop writes until ctx ends. ctx ends when this process loses the Lease.
func (w *Writer) writeLoop(ctx context.Context) {
	w.cfg.Logger.Info("this replica writes automatic VIPs to the status of ServiceEntries", "lease", w.cfg.Lease.String())
	retry := time.NewTimer(0)
	defer retry.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.cfg.Changed:
		case <-retry.C:
		}
		if err := w.round(ctx); err != nil && ctx.Err() == nil {
			if w.failure.Differs(err) {
				w.cfg.Logger.Warn("automatic VIPs are not written to the status of ServiceEntries; replicas may give a host different ones", "because", err)
			}
			retry.Reset(writeAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(writeEvery):
		}
	}
}

// round writes the status of all ServiceEntries whose status must change.
func (w *Writer) round(ctx context.Context) error {
	wanted := w.cfg.Wanted()
	if len(wanted) == 0 {
		return nil
	}
	if err := w.istiodIsAway(ctx); err != nil {
		return err
	}
	version, err := w.clients.servedVersion(ctx, schema.GroupResource{Group: "networking.istio.io", Resource: "serviceentries"})
	if err != nil {
		return err
	}
	entries := w.clients.dynamic.Resource(version)
	written, forbidden := 0, "" // the namespace in which the last write was forbidden
	var failure error           // the first one
	for _, key := range slices.SortedFunc(maps.Keys(wanted), object.Key.Compare) {
		if key.Namespace == forbidden {
			continue
		}
		switch err := w.write(ctx, entries.Namespace(key.Namespace), key.Name, wanted[key]); {
		case apierrors.IsConflict(err) || apierrors.IsNotFound(err) || errors.Is(err, errOutdated):
			// The ServiceEntry has changed since it was read. The event of that change leads to another round.
		case apierrors.IsForbidden(err): // by the role or, perhaps in this namespace only, by a policy
			forbidden = key.Namespace
			failure = cmp.Or(failure, fmt.Errorf("%s: %w: let nametap-discovery get serviceentries and patch serviceentries/status, see docs/discovery.md", key, err))
		case err != nil:
			failure = cmp.Or(failure, fmt.Errorf("%s: %w", key, err))
		case err == nil:
			written++
		}
	}
	if written > 0 {
		w.cfg.Logger.Info("wrote automatic VIPs to the status of ServiceEntries", "objects", written)
	}
	if failure == nil {
		w.failure.Forget()
	}
	return failure
}

// errOutdated is returned if a ServiceEntry has changed since its VIPs were computed.
var errOutdated = errors.New("the object has changed")

// write writes the VIPs of a ServiceEntry, unless the ServiceEntry has changed since its VIPs were computed.
func (w *Writer) write(ctx context.Context, entries dynamic.ResourceInterface, name string, s object.VIPStatus) error {
	current, err := entries.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(make(structs).decode(object.KindServiceEntry, current, current.Object).object.Entry, s.Entry) {
		return errOutdated
	}
	addresses := make([]map[string]string, len(s.VIPs))
	for i, vip := range s.VIPs {
		addresses[i] = map[string]string{"host": vip.Host, "value": vip.Addr.String()}
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": current.GetResourceVersion()},
		"status":   map[string]any{"addresses": addresses},
	})
	if err != nil {
		return err
	}
	_, err = entries.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// istiodIsAway returns an error if a controller of istiod writes the VIPs, or if this cannot be found out.
func (w *Writer) istiodIsAway(ctx context.Context) error {
	lock := new(corev1.ConfigMap)
	err := w.clients.core.Get().Namespace(w.cfg.RootNamespace).Resource("configmaps").Name(istiodLock).Do(ctx).Into(lock)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot find out whether istiod writes them: %w", err)
	}
	var holder struct {
		Identity string      `json:"holderIdentity"`
		Renewed  metav1.Time `json:"renewTime"`
	}
	if err := json.Unmarshal([]byte(lock.Annotations[istiodLockHolder]), &holder); err != nil {
		return nil //nolint:nilerr // it is not the lock of a controller
	}
	if holder.Identity == "" {
		return nil
	}
	if time.Since(holder.Renewed.Time) < istiodLockDuration {
		return fmt.Errorf("istiod (%s) writes them: it holds the lock in ConfigMap %s/%s", holder.Identity, w.cfg.RootNamespace, istiodLock)
	}
	if err := checkClock(ctx, w.clients.core); err != nil {
		return fmt.Errorf("cannot find out whether istiod (%s) writes them: %w", holder.Identity, err)
	}
	return nil
}
