package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/inject/webhook"
	"github.com/nametap/nametap/internal/settings"
)

// An injector holds the flags of the webhook that injects pods.
type injector struct {
	addr   string
	config string

	namespaces source.Namespaces // reads the namespaces of the pods; nil without an API server
	server     *discovery.Server // has the settings of the mesh
}

func (i *injector) addFlags(g settings.Group) {
	g.String(&i.addr, "inject-addr", "`address` that serves the webhook that adds the agent to pods, over TLS, with the certificate of --tls-cert; empty serves none")
	g.String(&i.config, "inject-config", "`file` with the settings of injection, which docs/injection.md lists; read again when it changes")
}

// open makes the webhook; it returns nil if the webhook is not served. It changes cfg, so that the server has a certificate.
func (i *injector) open(cfg *discovery.Config, logger *slog.Logger) (*webhook.Webhook, error) {
	if i.addr == "" {
		if i.config != "" {
			return nil, usageError{errors.New("--inject-config is for the webhook of --inject-addr: set both")}
		}
		return nil, nil //nolint:nilnil // documented
	}
	if cfg.TLS.Certificate == "" {
		return nil, usageError{errors.New("the webhook of --inject-addr needs a certificate: set --tls-cert and --tls-key")}
	}
	cfg.Certificate = true
	settings := webhook.Config{File: i.config, Logger: logger, ProxyMetadata: func() map[string]string { return i.server.ProxyMetadata() }}
	if cfg.Kubernetes != nil {
		i.namespaces = cfg.Kubernetes.NewNamespaces(logger)
		settings.Namespace = i.namespaces.Read
	}
	hook := webhook.New(settings)
	cfg.Registerer.MustRegister(hook.Metrics()...)
	return hook, nil
}

// serve opens the listener of the webhook, and serves it in the group until ctx ends.
func (i *injector) serve(ctx context.Context, group *errgroup.Group, hook *webhook.Webhook, server *discovery.Server) error {
	i.server = server
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", i.addr)
	if err != nil {
		return fmt.Errorf("serving the webhook on %s: %w: use another address, or none (--inject-addr)", i.addr, err)
	}
	if i.namespaces != nil {
		group.Go(func() error {
			i.namespaces.Run(ctx)
			return nil
		})
	}
	group.Go(func() error { return hook.Serve(ctx, ln, server.Certificate) })
	return nil
}
