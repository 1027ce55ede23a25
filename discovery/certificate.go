package discovery

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/source"
)

// A certificate is the certificate of the server.
type certificate struct {
	server *auth.Server       // nil without TLS
	secret source.Certificate // nil without a Secret
}

// newCertificate returns the certificate of the server; the zero value if no TLS is served.
func newCertificate(cfg Config) (c certificate, err error) {
	if err := cfg.validateTLS(); err != nil {
		return c, err
	}
	if !cfg.servesTLS() {
		return c, nil
	}
	var shared auth.GetCertificate
	if secret := cfg.TLSSecret; secret != nil {
		c.secret, err = secret.Access.NewCertificate(source.CertificateConfig{
			Namespace: secret.Namespace, Name: secret.Name, ConfigMap: secret.ConfigMap, Webhook: secret.Webhook,
			DNSNames: secret.names(cfg.ClusterDomain), Logger: cfg.Logger,
		})
		if err != nil {
			return certificate{}, err
		}
		shared = c.secret.Get
	}
	c.server, err = auth.NewServer(cfg.TLS, shared, cfg.Logger)
	return c, err
}

// await starts to follow the Secret, if there is one, and waits until it has a certificate or
// ctx ends. Before that nothing is served, so that the server is not ready.
func (c certificate) await(ctx context.Context, group *errgroup.Group) {
	if c.secret == nil {
		return
	}
	group.Go(func() error {
		c.secret.Run(ctx)
		return nil
	})
	select {
	case <-ctx.Done():
	case <-c.secret.Ready():
	}
}

// waiting returns why there is no certificate, or "" if there is one or none is needed.
func (c certificate) waiting() string {
	if c.secret == nil {
		return ""
	}
	return c.secret.Waiting()
}

// certificateMetrics collects the state of the certificate for TLS.
type certificateMetrics struct {
	of                              certificate
	expires, unpublished, untrusted *prometheus.Desc
}

func newCertificateMetrics(of certificate) *certificateMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("nametap_discovery_"+name, help, nil, nil)
	}
	return &certificateMetrics{
		of:          of,
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
	if m.of.server != nil {
		if at := m.of.server.Expires(); !at.IsZero() {
			expires = float64(at.Unix())
		}
	}
	if m.of.secret != nil {
		unpublished = float64(m.of.secret.Unpublished())
		if m.of.secret.Untrusted() {
			untrusted = 1
		}
	}
	to <- prometheus.MustNewConstMetric(m.expires, prometheus.GaugeValue, expires)
	to <- prometheus.MustNewConstMetric(m.unpublished, prometheus.GaugeValue, unpublished)
	to <- prometheus.MustNewConstMetric(m.untrusted, prometheus.GaugeValue, untrusted)
}
