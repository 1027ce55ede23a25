// Package webhook answers the API server's questions about pods that are created (AdmissionReview):
// package inject decides, and the answer has a JSON patch with the changes.
//
//  1. webhook.go has the server, its bounds and its metrics.
//  2. review.go answers one question. It has no side effects, so it does not ask for dryRun.
//  3. settings.go follows the file with the settings of injection.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/nametap/nametap/internal/httpguard"
)

// The paths. The configuration of the webhook selects the pods for each by labels, so that a path says
// whether the namespace is labelled, and namespaces need not be read.
const (
	// PathNamespace is for pods without a label in a namespace that is labelled.
	PathNamespace = "/inject/namespace"
	// PathPod is for pods with a label.
	PathPod = "/inject/pod"
)

// Bounds of the server.
const (
	// maxBody is the longest question, in bytes. The API server accepts objects of 3 MiB, and
	// admission comes before etcd's limit of 1.5 MiB.
	maxBody = 4 << 20
	// maxBytes bounds the sum of the questions that are answered at a time.
	maxBytes = 4 * maxBody
	// bodyTimeout bounds how long a client takes to send a question, for which others may wait.
	bodyTimeout = 2 * time.Second
	// maxPods is the number of pods that are injected at a time. Each needs up to 12 MiB, and the memory of
	// the container is 256 MiB.
	maxPods = 4
	// maxConns is the number of connections. An API server keeps 25 idle ones.
	maxConns = 1000
	// answerTimeout is how long an answer may take. The API server waits for 10 s.
	answerTimeout = 9 * time.Second
	// idleTimeout is longer than the 90 s after which the API server closes a connection itself: it
	// would report a question that meets the end of a connection as an error.
	idleTimeout = 3 * time.Minute
	// stopGrace bounds how long answers take when the server stops.
	stopGrace = 5 * time.Second
)

// Config configures a [Webhook].
type Config struct {
	// File has the settings of injection; "" means the defaults.
	File string
	// Logger is for logs; nil discards them.
	Logger *slog.Logger
}

// Webhook answers questions about pods. Make one with [New]. Its methods are safe for concurrent use.
type Webhook struct {
	log      *slog.Logger
	settings *settings
	bytes    *semaphore.Weighted // of questions
	pods     *semaphore.Weighted // that are injected
	draining atomic.Bool

	answers *prometheus.CounterVec
	seconds prometheus.Histogram
	broken  prometheus.GaugeFunc
}

// The outcomes of questions, beside those of package inject.
const (
	outcomeIgnored = "ignored" // not a pod, or not created
	outcomeInvalid = "invalid" // no question, or no pod
	outcomeBusy    = "busy"
)

// New reads the settings. An error says what is wrong with them.
func New(cfg Config) (*Webhook, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := newSettings(cfg.File, cfg.Logger)
	if err != nil {
		return nil, err
	}
	name := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "nametap", Subsystem: "discovery_inject", Name: name, Help: help}
	}
	return &Webhook{
		log: cfg.Logger, settings: s, bytes: semaphore.NewWeighted(maxBytes), pods: semaphore.NewWeighted(maxPods),
		answers: prometheus.NewCounterVec(prometheus.CounterOpts(name("requests_total",
			"Pods that the webhook was asked about, by outcome: injected, skipped, refused, ignored, invalid or busy.")), []string{"outcome"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "nametap", Subsystem: "discovery_inject", Name: "seconds", Help: "How long the webhook took for an answer, in seconds.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
		}),
		broken: prometheus.NewGaugeFunc(prometheus.GaugeOpts(name("settings_error",
			"1 while the file with the settings of injection cannot be used and the previous settings stay, otherwise 0.")), s.failing),
	}, nil
}

// Metrics returns the metrics, which docs/discovery.md lists.
func (w *Webhook) Metrics() []prometheus.Collector {
	return []prometheus.Collector{w.answers, w.seconds, w.broken}
}

// Drain lets each answer end its connection from now on, so that the API server connects to another
// replica while this one still answers.
func (w *Webhook) Drain() { w.draining.Store(true) }

// Serve serves on a listener until ctx ends, with the certificate that a function returns. It returns
// when all questions are answered.
func (w *Webhook) Serve(ctx context.Context, ln net.Listener, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) error {
	srv, ln := httpguard.New(w, ln, maxConns, w.log)
	srv.IdleTimeout, srv.ErrorLog = idleTimeout, slog.NewLogLogger(w.log.Handler(), slog.LevelDebug)
	// The API server uses HTTP/1.1 for webhooks.
	srv.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate, NextProtos: []string{"http/1.1"}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	following := make(chan struct{})
	go func() {
		defer close(following)
		w.settings.follow(ctx)
	}()
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		w.Drain()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // Serve returns the error
		}
	})
	err := srv.ServeTLS(ln, "", "")
	if !stop() {
		<-stopped
	}
	cancel()
	<-following
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serving the webhook: %w", err)
}

// ServeHTTP answers a question.
func (w *Webhook) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	began := time.Now()
	a := w.serve(to, r)
	if w.draining.Load() {
		to.Header().Set("Connection", "close")
	}
	w.answers.WithLabelValues(a.outcome).Inc()
	w.seconds.Observe(time.Since(began).Seconds())
	if a.status != http.StatusOK {
		w.log.Warn("the webhook has refused a request", "from", r.RemoteAddr, "status", a.status, "error", a.text)
		http.Error(to, a.text, a.status)
		return
	}
	to.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(to, a.text) // the client may have left
}

// serve returns the answer to a request. A panic, which a test would have found, is an answer, too.
func (w *Webhook) serve(to http.ResponseWriter, r *http.Request) (a answer) {
	defer func() {
		if v := recover(); v != nil {
			a = invalid(http.StatusInternalServerError, fmt.Sprintf("the webhook has failed: %v: please report this with the pod", v))
		}
	}()
	if r.URL.Path != PathNamespace && r.URL.Path != PathPod {
		return invalid(http.StatusNotFound, fmt.Sprintf("path %q: want %s or %s", r.URL.Path, PathNamespace, PathPod))
	}
	if r.Method != http.MethodPost {
		to.Header().Set("Allow", http.MethodPost)
		return invalid(http.StatusMethodNotAllowed, "want POST")
	}
	if r.ContentLength > maxBody {
		return tooLarge()
	}
	weight := r.ContentLength
	if weight < 0 {
		weight = maxBody
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerTimeout-bodyTimeout)
	defer cancel()
	if w.bytes.Acquire(ctx, weight) != nil {
		return busy()
	}
	defer w.bytes.Release(weight)
	_ = http.NewResponseController(to).SetReadDeadline(time.Now().Add(bodyTimeout)) // a connection can do that
	body, err := io.ReadAll(http.MaxBytesReader(to, r.Body, maxBody))
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return tooLarge()
	case err != nil:
		return invalid(http.StatusBadRequest, fmt.Sprintf("reading the request: %v", err))
	}
	if w.pods.Acquire(ctx, 1) != nil {
		return busy()
	}
	defer w.pods.Release(1)
	return w.review(r.URL.Path, body)
}

func busy() answer {
	return answer{http.StatusServiceUnavailable, outcomeBusy, "the webhook is busy with other pods: run more replicas of nametap-discovery"}
}

func tooLarge() answer {
	return invalid(http.StatusRequestEntityTooLarge, fmt.Sprintf("the request is too large: want at most %d MiB", maxBody>>20))
}
