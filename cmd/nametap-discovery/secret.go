package main

import (
	"fmt"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/discovery/clusters"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/settings"
)

// injectWebhook is the MutatingWebhookConfiguration whose caBundle gets the root certificate of --tls-secret.
const injectWebhook = "nametap-inject"

// A tlsSecret holds the flags of the Secret with the certificate.
type tlsSecret struct {
	secret    source.Name
	configMap string
}

func (s *tlsSecret) addFlags(g settings.Group) {
	g.Text(&s.secret, "tls-secret", "`NAMESPACE/NAME` of the Secret in which replicas make, keep and renew the certificate for --tls-addr, instead of files")
	g.String(&s.configMap, "tls-ca-configmap", "`name` of the ConfigMap that gets the root certificate of --tls-secret in every namespace; empty publishes none")
}

// resolveSecret finds out how to reach the Secret of the certificate, if there is one. With
// --config-dir, only the Secret is read from the Kubernetes API.
func (o *options) resolveSecret() error {
	if o.tlsSecret.secret == (source.Name{}) {
		return nil
	}
	access := o.server.Kubernetes
	if access == nil {
		var err error
		if access, err = clusters.Open(o.kubeconfig); err != nil {
			return fmt.Errorf("the Secret of --tls-secret: %w: name a file with the access to the Kubernetes API (--kubeconfig)", err)
		}
	}
	o.server.TLSSecret = &discovery.TLSSecret{Access: access, Name: o.tlsSecret.secret, ConfigMap: o.tlsSecret.configMap}
	if o.inject.addr != "" {
		o.server.TLSSecret.Webhook = injectWebhook
	}
	return nil
}
