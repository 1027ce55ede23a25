// Package webhook answers the API server's questions about pods that are created (AdmissionReview):
// package inject decides, and the answer has a JSON patch with the changes.
//
//  1. webhook.go has the server, its bounds and its metrics, and reads the questions.
//  2. review.go answers one question. It has no side effects, so it ignores dryRun.
//  3. settings.go reads the file with the settings of injection.
//
// Every pod may be able to connect, and the webhook cannot tell the API server from other clients. Therefore the
// webhook bounds connections and the memory of all requests, and slow clients give way (package connlimit).
package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/httpguard"
)

// The paths. The configuration of the webhook selects the pods for each path by labels, so the path
// tells whether the namespace is labelled.
const (
	// PathNamespace is for pods without a label in a namespace that is labelled.
	PathNamespace = "/inject/namespace"
	// PathPod is for pods with a label.
	PathPod = "/inject/pod"
)

// Bounds of the server. The memory of the container is 512 MiB; half of it suffices.
const (
	// maxBody is the longest question, in bytes. The API server accepts objects of 3 MiB, and
	// admission comes before etcd's limit of 1.5 MiB.
	maxBody = 4 << 20
	// smallBody is the longest question that is small. Nearly all questions are.
	smallBody = 16 << 10
	// maxHeld bounds the bytes of all answers that are being written, and of all questions without smallBody of each.
	maxHeld = 8 * maxBody
	// bodyTimeout bounds how long a client takes to send a question, and writeTimeout to read an answer.
	bodyTimeout, writeTimeout = 2 * time.Second, 5 * time.Second
	// maxPods is the number of small questions whose pods are injected at a time, and maxLargePods
	// the number of other questions. A small question needs up to 6 MiB, any other question up to 130 MiB.
	maxPods, maxLargePods = 4, 1
	// maxConns is the number of connections. An API server keeps 25 idle connections.
	maxConns = 1000
	// answerTimeout is how long an answer may take. The API server waits for 10 s.
	answerTimeout = 9 * time.Second
	// idleTimeout is longer than the 90 s after which the API server closes a connection itself. If the webhook closed the
	// connection first, a question could arrive at that moment, and the API server would report an error.
	idleTimeout = 3 * time.Minute
	// stopGrace bounds how long answers take when the server stops.
	stopGrace = 5 * time.Second
)

// Config configures a [Webhook].
type Config struct {
	// File has the settings of injection; "" means the defaults.
	File string
	// Namespace returns the labels and annotations of a namespace; nil if they are not known. It is called for each
	// question: a new annotation counts at once.
	Namespace func(ctx context.Context, name string) (labels, annotations map[string]string, err error)
	// ProxyMetadata returns [inject.Config.ProxyMetadata]; nil if there is no mesh config.
	ProxyMetadata func() map[string]string
	// Logger is for logs.
	Logger *slog.Logger
}

// Webhook answers questions about pods. Make one with [New]. Its methods are safe for concurrent use.
type Webhook struct {
	log       *slog.Logger
	reviewer  reviewer
	limit     *connlimit.Limit
	pods      *semaphore.Weighted // bounds the small questions whose pods are injected at a time
	largePods *semaphore.Weighted // bounds the other questions
	draining  atomic.Bool

	answers *prometheus.CounterVec
	seconds prometheus.Histogram
	broken  prometheus.GaugeFunc
}

// New reads the settings. If they cannot be used, the webhook refuses pods that should have the agent until the file
// has usable settings.
func New(cfg Config) *Webhook {
	s := &settings{file: cfg.File, log: cfg.Logger, cfg: inject.DefaultConfig(), usable: cfg.File == ""}
	_, _ = s.current() // says what is wrong with the file
	name := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "nametap", Subsystem: "discovery_inject", Name: name, Help: help}
	}
	return &Webhook{
		log: cfg.Logger, reviewer: reviewer{cfg.Logger, s, cfg.Namespace, cfg.ProxyMetadata}, limit: connlimit.New("webhook", maxConns, maxHeld),
		pods: semaphore.NewWeighted(maxPods), largePods: semaphore.NewWeighted(maxLargePods),
		answers: prometheus.NewCounterVec(prometheus.CounterOpts(name("requests_total",
			"Pods that the webhook was asked about, by outcome: injected, skipped, refused, ignored, invalid or busy.")), []string{"outcome"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "nametap", Subsystem: "discovery_inject", Name: "seconds", Help: "How long the webhook took for an answer, in seconds.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, 1, 5},
		}),
		broken: prometheus.NewGaugeFunc(prometheus.GaugeOpts(name("settings_error",
			"1 while the file with the settings of injection cannot be used, otherwise 0. The previous settings stay; without any, pods that should have the agent are refused.")), s.failing),
	}
}

// Metrics returns the metrics.
func (w *Webhook) Metrics() []prometheus.Collector {
	return []prometheus.Collector{w.answers, w.seconds, w.broken, w.limit.Metric()}
}

// Drain makes each answer end its connection from now on. The API server then connects to another replica while this
// replica still answers.
func (w *Webhook) Drain() { w.draining.Store(true) }

// Serve serves on a listener until ctx ends. The function certificate returns the certificate of the server. Serve
// returns when all questions are answered.
func (w *Webhook) Serve(ctx context.Context, ln net.Listener, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) error {
	defer w.limit.Close()
	srv, ln := httpguard.New(w, ln, w.limit, w.log)
	srv.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		return context.WithValue(ctx, placeKey{}, httpguard.Place(conn))
	}
	srv.IdleTimeout, srv.ErrorLog = idleTimeout, slog.NewLogLogger(w.log.Handler(), slog.LevelDebug)
	// The API server uses HTTP/1.1 for webhooks.
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate, NextProtos: []string{"http/1.1"}}
	if err := httpguard.Serve(ctx, srv, tls.NewListener(ln, config), stopGrace); err != nil {
		return fmt.Errorf("serving the webhook: %w", err)
	}
	return nil
}

// placeKey is the key of the place of a request's connection in the context.
type placeKey struct{}

// placeOf returns the place; nil if there is none.
func placeOf(ctx context.Context) *connlimit.Place {
	place, _ := ctx.Value(placeKey{}).(*connlimit.Place)
	return place
}

// ServeHTTP answers a question.
func (w *Webhook) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(r.Context(), answerTimeout)
	defer cancel()
	a := w.serve(ctx, to, r)
	placeOf(ctx).Hold(int64(len(a.text)))
	defer placeOf(ctx).Hold(-int64(len(a.text)))
	_ = http.NewResponseController(to).SetWriteDeadline(time.Now().Add(writeTimeout)) // fails only for writers without deadlines
	if w.draining.Load() {
		to.Header().Set("Connection", "close")
	}
	w.answers.WithLabelValues(a.outcome).Inc()
	w.seconds.Observe(time.Since(began).Seconds())
	if a.status != http.StatusOK {
		w.log.Warn("the webhook has refused a request", "from", r.RemoteAddr, "status", a.status, "error", string(a.text))
		http.Error(to, string(a.text), a.status)
		return
	}
	to.Header().Set("Content-Type", "application/json")
	_, _ = to.Write(a.text) // the client may have left
}

// serve returns the answer to a request. If injection panics, the answer says so.
func (w *Webhook) serve(ctx context.Context, to http.ResponseWriter, r *http.Request) (a answer) {
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
	ctx, cancel := context.WithTimeout(ctx, answerTimeout-bodyTimeout)
	defer cancel()
	placeOf(ctx).Hold(held(r))
	defer placeOf(ctx).Hold(-held(r))
	question, err := readBody(to, r)
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return invalid(http.StatusRequestEntityTooLarge, fmt.Sprintf("the request is too large: want at most %d MiB", maxBody>>20))
	case err != nil:
		return invalid(http.StatusBadRequest, fmt.Sprintf("reading the request: %v", err))
	}
	places := w.pods
	if held(r) > 0 {
		places = w.largePods
	}
	if places.Acquire(ctx, 1) != nil {
		return answer{http.StatusServiceUnavailable, outcomeBusy, []byte("the webhook is busy with other pods: run more replicas of nametap-discovery")}
	}
	defer places.Release(1)
	return w.reviewer.review(ctx, r.URL.Path == PathNamespace, question)
}

// held returns how many bytes the place of a question holds: what the client announces or, without that, the most.
func held(r *http.Request) int64 {
	if r.ContentLength < 0 {
		return maxBody - smallBody
	}
	return max(0, min(r.ContentLength, maxBody)-smallBody)
}

// readBody reads a question.
func readBody(to http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.ContentLength > maxBody {
		return nil, new(http.MaxBytesError)
	}
	place, connection := placeOf(r.Context()), http.NewResponseController(to)
	place.Await()
	defer place.Serve()
	_ = connection.SetReadDeadline(time.Now().Add(bodyTimeout)) // fails only for writers without deadlines
	question := bytes.NewBuffer(make([]byte, 0, max(r.ContentLength, 0)+bytes.MinRead))
	_, err := question.ReadFrom(http.MaxBytesReader(to, r.Body, maxBody))
	if err == nil {
		_ = connection.SetReadDeadline(time.Time{}) // otherwise the server would take an expired deadline for the end of the client
	}
	return question.Bytes(), err
}
