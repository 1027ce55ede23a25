package kube

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"sync"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

const (
	webhookConfigurations = "mutatingwebhookconfigurations"
	// fieldManager owns the field caBundle. Programs that apply a manifest without that field, such as
	// Helm, then have no conflict, and leave it as it is.
	fieldManager = "nametap-discovery"
)

// A bundler keeps the certificates of the authorities in the field caBundle of the webhooks of a
// MutatingWebhookConfiguration, so that the API server trusts the server.
type bundler struct {
	name           string // of the MutatingWebhookConfiguration
	client         *rest.RESTClient
	log            *slog.Logger
	configurations *mirror[webhooks]
	changed        chan struct{}

	mu      sync.Mutex
	roots   string // to write, in PEM; "" if there are none yet
	failing bool   // whether the last write has failed
}

// webhooks are the parts of a MutatingWebhookConfiguration that a bundler needs.
type webhooks struct {
	uid     types.UID
	names   []string
	bundles [][]byte // by the index of the name
}

func newBundler(name string, access *Access, log *slog.Logger) (*bundler, error) {
	client, err := typedClient(access.config, admissionregistrationv1.SchemeGroupVersion, admissionregistrationv1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	b := &bundler{name: name, client: client, log: log, changed: make(chan struct{}, 1)}
	b.configurations = &mirror[webhooks]{
		health: health{what: "MutatingWebhookConfiguration " + name, log: log}, changed: func() { notify(b.changed) },
		parts: map[cache.ObjectName]webhooks{}, part: webhooksOf,
	}
	return b, nil
}

func webhooksOf(o metav1.Object) webhooks {
	w := webhooks{uid: o.GetUID()}
	configuration, ok := o.(*admissionregistrationv1.MutatingWebhookConfiguration)
	if !ok {
		return w
	}
	for _, hook := range configuration.Webhooks {
		w.names, w.bundles = append(w.names, hook.Name), append(w.bundles, hook.ClientConfig.CABundle)
	}
	return w
}

// publish sets what to write.
func (b *bundler) publish(roots string) {
	b.mu.Lock()
	b.roots = roots
	b.mu.Unlock()
	notify(b.changed)
}

// unwritten reports whether the last write has failed.
func (b *bundler) unwritten() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failing
}

// run keeps the field until ctx ends.
func (b *bundler) run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() {
		follow(ctx, namedLister(b.client, webhookConfigurations, cache.NewObjectName("", b.name), &admissionregistrationv1.MutatingWebhookConfiguration{}), b.configurations, &b.configurations.health)
	})
	logged := ""
	keepUp(ctx, b.changed, b.pass, func(err error) {
		b.mu.Lock()
		b.failing = err != nil
		b.mu.Unlock()
		switch {
		case err == nil:
			logged = ""
		case err.Error() != logged:
			logged = err.Error()
			b.log.Error("the certificates for the webhook cannot be written, and the API server may not trust it", "configuration", b.name, "error", err)
		}
	})
}

// pass writes the certificates where they are missing.
func (b *bundler) pass(ctx context.Context) error {
	b.mu.Lock()
	roots := b.roots
	b.mu.Unlock()
	all, ok := b.configurations.all()
	seen, exists := all[cache.NewObjectName("", b.name)]
	if roots == "" || !ok || !exists {
		return nil
	}
	var names []string
	for i, name := range seen.names {
		if !trusts(seen.bundles[i], []byte(roots), time.Now()) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	// What is left out of a request is no longer applied, so it has all webhooks.
	err := b.write(ctx, seen, []byte(roots))
	switch {
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return nil // it was replaced or deleted, which is seen soon
	case err != nil:
		return fmt.Errorf("%w%s", err, adviceForRole(err))
	}
	b.log.Info("the certificates for the webhook were written", "configuration", b.name, "webhooks", names)
	return nil
}

// write applies the field to the object that was seen. With its UID, the API server makes no new object
// if it was deleted.
func (b *bundler) write(ctx context.Context, seen webhooks, roots []byte) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	type hook struct {
		Name         string `json:"name"`
		ClientConfig struct {
			CABundle []byte `json:"caBundle"`
		} `json:"clientConfig"`
	}
	var hooks []hook
	for _, name := range seen.names {
		h := hook{Name: name}
		h.ClientConfig.CABundle = roots
		hooks = append(hooks, h)
	}
	text, err := json.Marshal(map[string]any{
		"apiVersion": admissionregistrationv1.SchemeGroupVersion.String(), "kind": "MutatingWebhookConfiguration",
		"metadata": map[string]any{"name": b.name, "uid": seen.uid}, "webhooks": hooks,
	})
	if err != nil {
		return err
	}
	return b.client.Patch(types.ApplyPatchType).Resource(webhookConfigurations).Name(b.name).
		Param("fieldManager", fieldManager).Param("force", "true").Body(text).Do(ctx).Error()
}

// trusts reports whether a bundle has all roots, and nothing that has expired. More is left alone: while
// an authority is added, another replica may know it earlier, and must not be undone.
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

// certificatesIn returns the certificates in PEM; ok is false if something is no certificate, or has
// expired.
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
