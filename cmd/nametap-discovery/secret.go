package main

import (
	"fmt"
	"strings"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/discovery/clusters"
	"github.com/nametap/nametap/internal/settings"
)

// injectWebhook is the MutatingWebhookConfiguration whose caBundle gets the root certificate of --tls-secret.
const injectWebhook = "nametap-inject"

// A tlsSecret holds the flags of the Secret with the certificate.
type tlsSecret struct {
	secret    string // "NAMESPACE/NAME"
	configMap string
}

func (s *tlsSecret) addFlags(g settings.Group) {
	g.String(&s.secret, "tls-secret", "`NAMESPACE/NAME` of the Secret in which replicas make, keep and renew the certificate for --tls-addr, instead of files")
	g.String(&s.configMap, "tls-ca-configmap", "`name` of the ConfigMap that gets the root certificate of --tls-secret in every namespace; empty publishes none")
}

// resolveSecret finds out how to reach the Secret of the certificate, if there is one. With
// --config-dir, the Kubernetes API is asked for that only.
func (o *options) resolveSecret() error {
	if o.tlsSecret.secret == "" {
		return nil
	}
	namespace, name, ok := strings.Cut(o.tlsSecret.secret, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return usageError{fmt.Errorf("--tls-secret=%q: want NAMESPACE/NAME", o.tlsSecret.secret)}
	}
	access := o.server.Kubernetes
	if access == nil {
		var err error
		if access, err = clusters.Open(o.kubeconfig); err != nil {
			return fmt.Errorf("the Secret of --tls-secret: %w: name a file with the access to the Kubernetes API (--kubeconfig)", err)
		}
	}
	o.server.TLSSecret = &discovery.TLSSecret{Access: access, Namespace: namespace, Name: name, ConfigMap: o.tlsSecret.configMap}
	if o.inject.addr != "" {
		o.server.TLSSecret.Webhook = injectWebhook
	}
	return nil
}
