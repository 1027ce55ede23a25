package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/version"
)

// serve runs the control plane until ctx ends.
func serve(ctx context.Context, o *options, stderr io.Writer) error {
	logger := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.Level(o.logLevel)}))
	cfg := o.server
	cfg.Logger = logger
	if !o.stateDirGiven && cfg.StateDir != "" {
		cfg.StateDir = usableStateDir(cfg.StateDir, logger)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(version.Metric("nametap_discovery_build_info"), collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg.Registerer = registry
	server, err := discovery.New(cfg)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	if o.httpAddr != "" {
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", o.httpAddr)
		if err != nil {
			return fmt.Errorf("serving status on %s: %w: use another address, or none (--http-addr)", o.httpAddr, err)
		}
		logger.Info("serving status", "address", ln.Addr().String())
		group.Go(func() error { return serveStatus(ctx, ln, statusHandler(server, registry)) })
	}
	group.Go(func() error { return server.Run(ctx) })
	return group.Wait()
}

// usableStateDir returns dir, or "" if this user cannot create or write it, so that trying
// nametap out does not need root. It returns dir after any other error, such as a full
// disk, which then makes discovery.New fail.
func usableStateDir(dir string, logger *slog.Logger) string {
	err := statedir.Check(dir)
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, syscall.EROFS) && !errors.Is(err, syscall.ENOTDIR) {
		return dir
	}
	logger.Warn("automatic VIPs and the last good objects are kept in memory only: after a restart a host may get another VIP, "+
		"and an object that is broken then is left out; "+
		"set --state-dir to a directory that can be written, or to nothing if that is intended", "error", err)
	return ""
}

// statusHandler serves probes, metrics and the errors in documents.
func statusHandler(server *discovery.Server, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz/live", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	mux.HandleFunc("GET /healthz/ready", func(w http.ResponseWriter, _ *http.Request) {
		select {
		case <-server.Ready():
			w.WriteHeader(http.StatusOK)
		default:
			http.Error(w, server.Waiting(), http.StatusServiceUnavailable)
		}
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /debug/errors", httpguard.LocalOnly(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		errs := server.Errors()
		if errs == nil {
			errs = []discovery.DocumentError{} // encoded as [] instead of null
		}
		_ = json.NewEncoder(w).Encode(errs) // fails only if the client has disconnected
	}))
	return mux
}

func serveStatus(ctx context.Context, ln net.Listener, h http.Handler) error {
	srv := httpguard.New(h, httpguard.MaxConns)
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		_ = srv.Close() // Serve returns the error
	})
	err := srv.Serve(ln)
	if !stop() {
		<-stopped
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serving status: %w", err)
}

// printTable prints the table of a client. It lists broken documents and then fails, so
// that it can check a directory before a rollout.
func printTable(o *options, stdout, stderr io.Writer) error {
	table, broken, err := discovery.Table(o.server, o.client)
	if err != nil {
		return err
	}
	if o.output == outputText {
		err = printText(stdout, table)
	} else {
		err = printProto(stdout, table)
	}
	if err != nil {
		return fmt.Errorf("printing the table: %w", err)
	}
	for _, e := range broken {
		if _, err := fmt.Fprintln(stderr, e); err != nil {
			return fmt.Errorf("listing errors: %w", err)
		}
	}
	if len(broken) > 0 {
		return fmt.Errorf("broken documents in %s (errors: %d): the objects named above are not in the table; repair them",
			o.server.ConfigDir, len(broken))
	}
	return nil
}

// printText prints a line per host, in the form of `nametap table`.
func printText(w io.Writer, table *api.NameTable) error {
	columns := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "HOST\tREGISTRY\tADDRESSES")
	for _, host := range slices.Sorted(maps.Keys(table.GetTable())) {
		info := table.GetTable()[host]
		fmt.Fprintf(columns, "%s\t%s\t%s\n", host, info.GetRegistry(), strings.Join(info.GetIps(), " "))
	}
	return columns.Flush()
}

// printProto prints a message as JSON. It uses encoding/json for the output, because
// protojson deliberately varies its spaces and does not sort the hosts.
func printProto(w io.Writer, m proto.Message) error {
	data, err := protojson.Marshal(m)
	if err != nil {
		return err
	}
	var plain any
	if err := json.Unmarshal(data, &plain); err != nil {
		return err
	}
	return printJSON(w, plain)
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
