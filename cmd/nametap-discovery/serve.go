package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/inject/webhook"
	"github.com/nametap/nametap/internal/cgroup"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/fleetpage"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/version"
)

// serve runs the control plane until ctx ends.
func serve(ctx context.Context, o *options, stderr io.Writer) error {
	logger := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: o.logLevel.LevelVar, ReplaceAttr: cutValue}))
	cfg := o.server
	cfg.Logger, cfg.MemoryLimit = logger, boundMemory()
	registry := prometheus.NewRegistry()
	registry.MustRegister(version.Metric("nametap_discovery_build_info"), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg.Registerer = registry
	var server *discovery.Server
	hook, err := o.newWebhook(&cfg, func() map[string]string { return server.ProxyMetadata() })
	if err != nil {
		return err
	}
	if server, err = discovery.New(cfg); err != nil {
		return err
	}
	stopping := ctx
	ctx, cancel := afterDrain(stopping, server.Ready(), logger)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	if o.httpAddr != "" {
		ln, err := listenOn(ctx, "status", o.httpAddr, "--http-addr")
		if err != nil {
			return err
		}
		logger.Info("serving status", "address", ln.Addr().String())
		limit := connlimit.New("status", maxStatusConns, 0)
		registry.MustRegister(limit.Metric())
		srv, ln := httpguard.New(statusHandler(stopping, server, registry), ln, limit, logger)
		srv.SetKeepAlivesEnabled(false) // otherwise one client could send any number of requests at once
		group.Go(func() error {
			if err := httpguard.Serve(ctx, srv, ln, 0); err != nil {
				return fmt.Errorf("serving status: %w", err)
			}
			return nil
		})
	}
	if hook != nil {
		ln, err := listenOn(ctx, "the webhook", o.injectAddr, "--inject-addr")
		if err != nil {
			return err
		}
		group.Go(func() error { return hook.Serve(ctx, ln, server.Certificate) })
		context.AfterFunc(stopping, hook.Drain)
	}
	group.Go(func() error { return server.Run(ctx) })
	return group.Wait()
}

// newWebhook makes the webhook that adds the agent to pods; it returns nil if none is served. It changes cfg, so that the
// server has a certificate.
func (o *options) newWebhook(cfg *discovery.Config, proxyMetadata func() map[string]string) (*webhook.Webhook, error) {
	switch {
	case o.injectAddr == "" && o.injectConfig != "":
		return nil, usageError{errors.New("--inject-config is for the webhook of --inject-addr: set both")}
	case o.injectAddr == "":
		return nil, nil //nolint:nilnil // documented
	case cfg.TLS.Certificate == "":
		return nil, usageError{errors.New("the webhook of --inject-addr needs a certificate: set --tls-cert and --tls-key")}
	}
	cfg.Certificate = true
	settings := webhook.Config{File: o.injectConfig, Logger: cfg.Logger, ProxyMetadata: proxyMetadata}
	if cfg.Kubernetes != nil {
		settings.Namespace = cfg.Kubernetes.Namespace
	}
	hook := webhook.New(settings)
	cfg.Registerer.MustRegister(hook.Metrics()...)
	return hook, nil
}

// listenOn listens on an address, which flag sets, to serve what.
func listenOn(ctx context.Context, what, address, flag string) (net.Listener, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serving %s on %s: %w: use another address, or none (%s)", what, address, err, flag)
	}
	return ln, nil
}

// maxLogged bounds a value in a line of the log, in bytes. Errors quote what clients send and what objects have.
const maxLogged = 512

// cutValue shortens a long value in a line of the log.
func cutValue(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindString, slog.KindAny:
		if text := a.Value.String(); len(text) > maxLogged {
			return slog.String(a.Key, fmt.Sprintf("%s (%d bytes)", clip.Text(text, maxLogged), len(text)))
		}
	default:
	}
	return a
}

// inPod is an environment variable that kubelet sets in each container.
const inPod = "KUBERNETES_SERVICE_HOST"

// podDrain is how long kube-proxy may still send clients to a pod that is ending.
const podDrain = 5 * time.Second

// afterDrain returns a context that ends when the context in the parameter stopping has ended. In a pod, it ends after
// a further podDrain: by then, kube-proxy sends no client to this replica any more, so a client that loses its stream
// connects to another replica. If the server is not ready, it has no clients, and the context ends at once.
func afterDrain(stopping context.Context, ready <-chan struct{}, logger *slog.Logger) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stopping))
	context.AfterFunc(stopping, func() {
		select {
		case <-ready:
		default:
			cancel()
			return
		}
		if os.Getenv(inPod) == "" {
			cancel()
			return
		}
		logger.Info("serving until the drain is over", "drain", podDrain)
		time.AfterFunc(podDrain, cancel)
	})
	return ctx, cancel
}

// statusHandler serves probes, metrics, the errors in objects, the state of resources and the state of agents. After
// the context stopping has ended, the readiness probe fails.
func statusHandler(stopping context.Context, server *discovery.Server, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz/live", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /healthz/ready", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-stopping.Done():
			http.Error(w, "draining", http.StatusServiceUnavailable)
			return
		default:
		}
		switch why, err := server.Waiting(), server.Problem(); {
		case why != "" || !chans.Closed(server.Ready()):
			http.Error(w, why, http.StatusServiceUnavailable)
		case err != nil:
			_, _ = fmt.Fprintln(w, "clients cannot connect over TLS:", err) // fails only if the client has disconnected
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{CoalesceGather: true}))
	mux.Handle("GET /debug/errors", listHandler(server.Errors))
	mux.Handle("GET /debug/objects", listHandler(server.Resources))
	mux.Handle("GET "+agentsPath, agentsHandler(server))
	mux.Handle("GET /fleet", httpguard.LocalOnly(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(fleetpage.Page()) // fails only if the client has disconnected
	}))
	return mux
}

// listHandler serves a list as JSON to programs on this host.
func listHandler[T any](list func() []T) http.Handler {
	return httpguard.LocalOnly(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		all := append([]T{}, list()...)    // encoded as [] if it is empty
		_ = json.NewEncoder(w).Encode(all) // fails only if the client has disconnected
	})
}

// maxStatusConns is the number of connections to the status endpoints.
const maxStatusConns = 128

const (
	// gcPercent is how much the heap may grow before garbage is collected, in percent of the memory in use. Nearly all
	// of that memory is for objects, tables and connections, which stay. With Go's default of 100, garbage could take
	// as much memory as these. With 50, garbage would take 6 KiB more for each of 10,000 agents than with 25.
	gcPercent = 25
	// goShare is the part of a cgroup's memory that Go may use, in percent. The rest is for the pages of the binary,
	// 26 MiB, and for the sockets of the kernel.
	goShare = 85
)

// boundMemory makes the process collect garbage early, unless the user has set GOGC. It limits the process to goShare
// of the cgroup's memory, unless the user has set GOMEMLIMIT. It returns the limit; 0 for none.
func boundMemory() int64 {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := cgroup.MemoryLimit("/"); os.Getenv("GOMEMLIMIT") == "" && limit > 0 {
		debug.SetMemoryLimit(limit / 100 * goShare)
	}
	if limit := debug.SetMemoryLimit(-1); limit < math.MaxInt64 {
		return limit
	}
	return 0
}
