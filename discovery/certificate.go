package discovery

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/source"
)

// A certificate supplies the certificate of the server, from files or from a Secret.
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
			Secret: secret.Name, ConfigMap: secret.ConfigMap, Webhook: secret.Webhook,
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

// await starts to follow the Secret, if there is one, and waits until it has a certificate or ctx
// ends. Before there is a certificate, nothing is served, and the server is not ready.
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

// metrics returns the metrics of the certificate for TLS.
func (c certificate) metrics() []prometheus.Collector {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "nametap", Subsystem: "discovery", Name: name, Help: help}, value)
	}
	return []prometheus.Collector{
		gauge("certificate_expiry_timestamp_seconds", "When the certificate for TLS expires, in Unix time; 0 without one.", c.expires),
		gauge("unpublished_namespaces", "Namespaces whose ConfigMap with the root certificate cannot be written, or is replaced by another program again and again.", func() float64 {
			if c.secret == nil {
				return 0
			}
			return float64(c.secret.Unpublished())
		}),
		gauge("inject_untrusted", "1 while the certificates of the authorities cannot be written to the MutatingWebhookConfiguration, or another program replaces them again and again, otherwise 0.", func() float64 {
			return oneIf(c.secret != nil && c.secret.Untrusted())
		}),
	}
}

// expires returns when the certificate expires, in Unix time; 0 if there is none.
func (c certificate) expires() float64 {
	if c.server == nil {
		return 0
	}
	if at := c.server.Expires(); !at.IsZero() {
		return float64(at.Unix())
	}
	return 0
}
