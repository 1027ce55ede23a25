package kube

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/logonce"
)

const webhookConfigurations = "mutatingwebhookconfigurations"

// A bundler writes the certificates of the authorities to the field caBundle of the webhooks in a
// MutatingWebhookConfiguration. The API server then trusts the certificate of nametap-discovery.
type bundler struct {
	name           string // of the MutatingWebhookConfiguration
	client         *rest.RESTClient
	log            *slog.Logger
	configurations *mirror[webhooks]
	changed        chan struct{}

	// The fields below are owned by the goroutine of run.
	pace   pace
	blamed string // the programs that the log named last

	mu       sync.Mutex
	roots    string    // the certificates to write, in PEM; "" if there are none yet
	failing  bool      // the last write has failed
	disputed time.Time // until then, another program counts as writing the field
}

func newBundler(name string, access *Access, log *slog.Logger) (*bundler, error) {
	client, err := typedClient(access.config, admissionregistrationv1.SchemeGroupVersion, admissionregistrationv1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	b := &bundler{name: name, client: client, log: log, changed: make(chan struct{}, 1)}
	b.configurations = newMirror("MutatingWebhookConfiguration "+name, log, func() { chans.Wake(b.changed) }, webhooksOf)
	return b, nil
}

// publish sets the certificates to write.
func (b *bundler) publish(roots string) {
	b.mu.Lock()
	b.roots = roots
	b.mu.Unlock()
	chans.Wake(b.changed)
}

// current returns the certificates to write.
func (b *bundler) current() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.roots
}

// unwritten reports whether the last write has failed, or another program replaces the certificates again and again.
func (b *bundler) unwritten() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failing || time.Now().Before(b.disputed)
}

// run keeps the certificates in the field until ctx ends.
func (b *bundler) run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() {
		syncStore(ctx, namedLister(b.client, webhookConfigurations, cache.NewObjectName("", b.name), &admissionregistrationv1.MutatingWebhookConfiguration{}), b.configurations, &b.configurations.health)
	})
	var failure logonce.Failure
	keepUp(ctx, b.changed, b.reconcile, func(err error) {
		b.mu.Lock()
		b.failing = err != nil
		b.mu.Unlock()
		if failure.Differs(err) {
			b.log.Error("the certificates for the webhook cannot be written, and the API server may not trust it", "configuration", b.name, "error", err)
		}
	})
}

// reconcile writes the certificates to webhooks that lack them. The result next is the time until the next pass. If
// another program writes the field, too, reconcile writes only after a pause.
func (b *bundler) reconcile(ctx context.Context) (next time.Duration, err error) {
	roots := b.current()
	all, ok := b.configurations.all()
	seen, exists := all[cache.NewObjectName("", b.name)]
	if roots == "" || !ok || !exists {
		return recheck, nil
	}
	var names []string
	var patch []operation
	for i, name := range seen.names {
		if !trusts(seen.bundles[i], []byte(roots), time.Now()) {
			names = append(names, name)
			patch = append(patch, operation{"add", "/webhooks/" + strconv.Itoa(i) + "/clientConfig/caBundle", []byte(roots)})
		}
	}
	if len(patch) > 0 {
		if left := b.pace.left(roots); left > 0 {
			return left, nil
		}
		b.count(roots, seen)
	} else {
		for _, i := range slices.Backward(seen.owned) {
			patch = append(patch, operation{Op: "remove", Path: "/metadata/managedFields/" + strconv.Itoa(i)})
		}
	}
	if len(patch) == 0 {
		return recheck, nil
	}
	err = b.write(ctx, seen, patch)
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err), inapplicable(err):
		return recheck, nil // the object was changed or deleted: its event causes the next pass
	case err != nil:
		advice := ""
		if apierrors.IsForbidden(err) {
			advice = ": apply the ClusterRole of deploy/kubernetes/webhook.yaml, or set --tls-cert if another program writes the caBundle (docs/injection.md)"
		}
		return recheck, fmt.Errorf("%w%s", err, advice)
	}
	if len(names) > 0 {
		b.log.Info("the certificates for the webhook were written", "configuration", b.name, "webhooks", names)
	}
	return recheck, nil
}

// count counts a write. If other programs write the field again and again, it logs their names when the names change.
func (b *bundler) count(roots string, hooks webhooks) {
	if !b.pace.disputed() {
		b.blamed = ""
	}
	b.pace.count(roots)
	if !b.pace.disputed() {
		return
	}
	b.mu.Lock()
	b.disputed = time.Now().Add(b.pace.untilQuiet())
	b.mu.Unlock()
	writers := fmt.Sprint(hooks.writers)
	if writers == b.blamed {
		return
	}
	b.blamed = writers
	advice := "remove caBundle from what that program applies, or set --tls-cert so that only that program writes it"
	if len(hooks.writers) == 0 {
		advice = "its writer is unknown: see whether another installation of nametap-discovery, with another certificate, writes it, too"
	}
	b.log.Error("another program writes the caBundle of the webhook again and again, and the API server may not trust the webhook meanwhile: "+advice,
		"configuration", b.name, "field_managers", hooks.writers, "restored", b.pace.restored)
}

// write patches the object, unless the object has changed since hooks were read from it.
func (b *bundler) write(ctx context.Context, hooks webhooks, patch []operation) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	text, err := json.Marshal(append([]operation{{"replace", "/metadata/resourceVersion", hooks.version}}, patch...))
	if err != nil {
		return err
	}
	return b.client.Patch(types.JSONPatchType).Resource(webhookConfigurations).Name(b.name).
		Param("fieldManager", fieldManager).Body(text).Do(ctx).Error()
}

// An operation is an operation of a JSON patch (RFC 6902).
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// inapplicable reports whether err says that a patch changes a part that was removed from the object. The API server
// reports that before it compares versions. Unlike an error about a value, this error names no field.
func inapplicable(err error) bool {
	status := new(apierrors.StatusError)
	return errors.As(err, &status) && apierrors.IsInvalid(err) && (status.ErrStatus.Details == nil || len(status.ErrStatus.Details.Causes) == 0)
}

// webhooks are the parts of a MutatingWebhookConfiguration that a bundler needs.
type webhooks struct {
	version string // resourceVersion
	names   []string
	bundles [][]byte // the caBundle of each of names
	owned   []int    // the indices of the managedFields of fieldManager
	writers []string // other programs that own a caBundle
}

func webhooksOf(o metav1.Object) webhooks {
	w := webhooks{version: o.GetResourceVersion()}
	configuration, ok := o.(*admissionregistrationv1.MutatingWebhookConfiguration)
	if !ok {
		return w
	}
	for _, hook := range configuration.Webhooks {
		w.names, w.bundles = append(w.names, hook.Name), append(w.bundles, hook.ClientConfig.CABundle)
	}
	for i, entry := range configuration.ManagedFields {
		if entry.Manager == fieldManager {
			w.owned = append(w.owned, i)
		}
	}
	w.writers = writersOf(configuration.ManagedFields, "caBundle")
	return w
}

// trusts reports whether a bundle has all roots and no expired certificate. The bundle may also have other
// certificates. They may be from another replica that has learned of a new authority earlier, and must stay.
func trusts(bundle, roots []byte, now time.Time) bool {
	have, ok := certificatesIn(bundle, now)
	if !ok {
		return false
	}
	want, _ := certificatesIn(roots, now)
	for der := range want {
		if !have[der] {
			return false
		}
	}
	return true
}

// certificatesIn returns the certificates in text, which is PEM. The result ok is false if text has a part that is not
// a certificate, or a certificate that has expired.
func certificatesIn(text []byte, now time.Time) (all map[string]bool, ok bool) {
	all = map[string]bool{}
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			return all, len(bytes.TrimSpace(text)) == 0
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil || now.After(certificate.NotAfter) {
			return all, false
		}
		all[string(block.Bytes)], text = true, rest
	}
}
