package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// A TLSSecret is the Secret in which replicas keep the certificate that they share.
type TLSSecret struct {
	// Access says how to reach the API server.
	Access source.API
	// Namespace and Name name the Secret.
	Namespace, Name string
	// DNSNames are the names in the certificate. Empty means the names of the Service
	// "nametap-discovery" in the namespace of the Secret.
	DNSNames []string
	// ConfigMap is the name of the ConfigMaps that get the root certificate, one in each namespace; ""
	// means none.
	ConfigMap string
	// Webhook is the name of the MutatingWebhookConfiguration that gets the root certificate; "" means
	// none.
	Webhook string
}

// serviceName is the name of the Service of deploy/kubernetes/discovery.yaml.
const serviceName = "nametap-discovery"

// names returns the names in the certificate.
func (s *TLSSecret) names(clusterDomain string) []string {
	if len(s.DNSNames) > 0 {
		return s.DNSNames
	}
	name := serviceName + "." + s.Namespace
	return []string{name + ".svc", name, name + ".svc." + clusterDomain}
}

// servesTLS reports whether something is served over TLS.
func (c Config) servesTLS() bool { return c.TLSAddr != "" || c.Certificate }

// validateTLS returns an error unless there is a certificate for what is served over TLS.
func (c Config) validateTLS() error {
	inFiles, given := c.TLS.Certificate != "" && c.TLS.Key != "", c.TLS.Certificate != "" || c.TLS.Key != ""
	switch {
	case c.TLSSecret != nil && given:
		return errors.New("two certificates for TLS: set --tls-secret, or --tls-cert and --tls-key")
	case c.TLSSecret != nil && !c.servesTLS():
		return errors.New("the certificate in --tls-secret is for --tls-addr: set both")
	case c.servesTLS() && c.TLSSecret == nil && !inFiles:
		return errors.New("TLS needs a certificate and its key: set --tls-cert and --tls-key, or --tls-secret")
	}
	if c.TLSSecret == nil {
		return nil
	}
	for _, name := range c.TLSSecret.DNSNames {
		if !object.IsHost(name) {
			return fmt.Errorf("name of the server %q: want a DNS name", name)
		}
	}
	return nil
}

// newTLS makes the certificate of the server, if TLS is served.
func (s *Server) newTLS() error {
	if err := s.cfg.validateTLS(); err != nil {
		return err
	}
	if !s.cfg.servesTLS() {
		return nil
	}
	var shared auth.GetCertificate
	if secret := s.cfg.TLSSecret; secret != nil {
		var err error
		s.certificate, err = secret.Access.NewCertificate(source.CertificateConfig{
			Namespace: secret.Namespace, Name: secret.Name, ConfigMap: secret.ConfigMap, Webhook: secret.Webhook,
			DNSNames: secret.names(s.cfg.ClusterDomain), Logger: s.cfg.Logger,
		})
		if err != nil {
			return err
		}
		shared = s.certificate.Get
	}
	var err error
	s.tls, err = auth.NewServer(s.cfg.TLS, shared, s.cfg.Logger)
	return err
}

// Certificate returns the certificate of the server, for what the caller serves. It has the form of
// [tls.Config.GetCertificate].
func (s *Server) Certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return s.tls.Certificate(hello)
}

// awaitCertificate starts to follow the Secret, if there is one, and waits until it has a certificate or
// ctx ends. Before that nothing is served, so that the server is not ready.
func (s *Server) awaitCertificate(ctx context.Context, group *errgroup.Group) {
	if s.certificate == nil {
		return
	}
	group.Go(func() error {
		s.certificate.Run(ctx)
		return nil
	})
	select {
	case <-ctx.Done():
	case <-s.certificate.Ready():
	}
}

// waitingForCertificate returns why there is no certificate, or "" if there is one or none is needed.
func (s *Server) waitingForCertificate() string {
	if s.certificate == nil {
		return ""
	}
	return s.certificate.Waiting()
}

// certificateMetrics collects the state of the certificate for TLS.
type certificateMetrics struct {
	server                          *Server
	expires, unpublished, untrusted *prometheus.Desc
}

func newCertificateMetrics(s *Server) *certificateMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("nametap_discovery_"+name, help, nil, nil)
	}
	return &certificateMetrics{
		server:      s,
		expires:     desc("certificate_expiry_timestamp_seconds", "When the certificate for TLS expires, in Unix time; 0 without one."),
		unpublished: desc("unpublished_namespaces", "Namespaces whose ConfigMap with the root certificate cannot be written, or is replaced by another program again and again."),
		untrusted:   desc("inject_untrusted", "1 while the certificates of the authorities cannot be written to the MutatingWebhookConfiguration, or another program replaces them again and again, otherwise 0."),
	}
}

// Describe sends the descriptions of the metrics.
func (m *certificateMetrics) Describe(to chan<- *prometheus.Desc) {
	to <- m.expires
	to <- m.unpublished
	to <- m.untrusted
}

// Collect sends the metrics.
func (m *certificateMetrics) Collect(to chan<- prometheus.Metric) {
	var expires, unpublished, untrusted float64
	if m.server.tls != nil {
		if at := m.server.tls.Expires(); !at.IsZero() {
			expires = float64(at.Unix())
		}
	}
	if m.server.certificate != nil {
		unpublished = float64(m.server.certificate.Unpublished())
		if m.server.certificate.Untrusted() {
			untrusted = 1
		}
	}
	to <- prometheus.MustNewConstMetric(m.expires, prometheus.GaugeValue, expires)
	to <- prometheus.MustNewConstMetric(m.unpublished, prometheus.GaugeValue, unpublished)
	to <- prometheus.MustNewConstMetric(m.untrusted, prometheus.GaugeValue, untrusted)
}
