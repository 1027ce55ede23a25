// Package webhook answers the API server's questions about pods that are created (AdmissionReview):
// package inject decides, and the answer has a JSON patch with the changes.
//
//  1. webhook.go has the server, its bounds and its metrics, and reads the questions.
//  2. budget.go bounds the bytes that requests hold.
//  3. review.go answers one question. It has no side effects, so it ignores dryRun.
//  4. settings.go follows the file with the settings of injection.
//
// Every pod may be able to connect, and the webhook cannot tell the API server from other clients. Therefore the
// webhook bounds the memory for all requests, and a slow client does not keep other clients waiting.
package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

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

// Bounds of the server. The memory of the container is 512 MiB; TestWebhookRequests measures that half of it suffices.
const (
	// maxBody is the longest question, in bytes. The API server accepts objects of 3 MiB, and
	// admission comes before etcd's limit of 1.5 MiB.
	maxBody = 4 << 20
	// smallBody is the longest question that is read without a part of the budget. Nearly all questions are shorter.
	smallBody = 16 << 10
	// maxBodies bounds the bytes of all longer questions together, and maxAnswers the bytes of all answers that are
	// being written.
	maxBodies, maxAnswers = 2 * maxBody, 2 * maxBody
	// bodyTimeout bounds how long a client takes to send a question, and writeTimeout to read an answer.
	bodyTimeout, writeTimeout = 2 * time.Second, 5 * time.Second
	// maxPods is the number of small questions whose pods are injected at a time, and maxLargePods
	// the number of other questions. A small question needs up to 6 MiB, any other question up to 70 MiB
	// (BenchmarkCostlyFields).
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
	// Logger is for logs; nil discards them.
	Logger *slog.Logger
}

// Webhook answers questions about pods. Make one with [New]. Its methods are safe for concurrent use.
type Webhook struct {
	log       *slog.Logger
	reviewer  reviewer
	bodies    *budget             // for questions that are not small
	texts     *budget             // for answers
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
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := newSettings(cfg.File, cfg.Logger)
	name := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "nametap", Subsystem: "discovery_inject", Name: name, Help: help}
	}
	return &Webhook{
		log: cfg.Logger, reviewer: reviewer{cfg.Logger, s, cfg.Namespace}, bodies: newBudget(maxBodies), texts: newBudget(maxAnswers),
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

// Metrics returns the metrics, which docs/discovery-reference.md lists.
func (w *Webhook) Metrics() []prometheus.Collector {
	return []prometheus.Collector{w.answers, w.seconds, w.broken}
}

// Drain makes each answer end its connection from now on. The API server then connects to another replica while this
// replica still answers.
func (w *Webhook) Drain() { w.draining.Store(true) }

// Serve serves on a listener until ctx ends. The function certificate returns the certificate of the server. Serve
// returns when all questions are answered.
func (w *Webhook) Serve(ctx context.Context, ln net.Listener, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) error {
	srv, ln := httpguard.New(w, ln, maxConns, w.log)
	srv.IdleTimeout, srv.ErrorLog = idleTimeout, slog.NewLogLogger(w.log.Handler(), slog.LevelDebug)
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	following.Go(func() { w.reviewer.settings.run(ctx) })
	// The API server uses HTTP/1.1 for webhooks.
	config := &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate, NextProtos: []string{"http/1.1"}}
	if err := httpguard.Serve(ctx, srv, tls.NewListener(ln, config), stopGrace); err != nil {
		return fmt.Errorf("serving the webhook: %w", err)
	}
	return nil
}

// ServeHTTP answers a question.
func (w *Webhook) ServeHTTP(to http.ResponseWriter, r *http.Request) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(r.Context(), answerTimeout)
	defer cancel()
	a := w.serve(ctx, to, r)
	connection := http.NewResponseController(to)
	p := w.texts.take(ctx, int64(len(a.text)), func() { _ = connection.SetWriteDeadline(time.Unix(1, 0)) })
	if p == nil {
		a = busy()
	} else {
		defer w.texts.release(p)
	}
	_ = connection.SetWriteDeadline(time.Now().Add(writeTimeout)) // fails only for writers without deadlines
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
	question, fails := w.readBody(ctx, to, r)
	if fails != nil {
		return *fails
	}
	defer question.release()
	places := w.pods
	if question.large {
		places = w.largePods
	}
	if places.Acquire(ctx, 1) != nil {
		return busy()
	}
	defer places.Release(1)
	return w.reviewer.review(ctx, r.URL.Path == PathNamespace, question.text)
}

// A body is a question that was read.
type body struct {
	text  []byte
	large bool
	// release gives back what the question holds. The text must not be used after that.
	release func()
}

// readBody reads a question. If that fails, fails is the answer. A short question holds nothing while it is read, so
// slow clients do not keep other clients waiting. A long question holds its bytes of the budget.
func (w *Webhook) readBody(ctx context.Context, to http.ResponseWriter, r *http.Request) (b body, fails *answer) {
	failed := func(a answer) (body, *answer) { return body{}, &a }
	if r.ContentLength > maxBody {
		return failed(tooLarge())
	}
	connection := http.NewResponseController(to)
	_ = connection.SetReadDeadline(time.Now().Add(bodyTimeout)) // fails only for writers without deadlines
	from := http.MaxBytesReader(to, r.Body, maxBody)
	text, err := io.ReadAll(io.LimitReader(from, smallBody+1))
	release := func() {}
	large := len(text) > smallBody
	if err == nil && large {
		weight := r.ContentLength
		if weight < 0 {
			weight = 2 * maxBody // the buffer grows, and the previous one is garbage
		}
		p := w.bodies.take(ctx, weight, func() { _ = connection.SetReadDeadline(time.Unix(1, 0)) })
		if p == nil {
			return failed(busy())
		}
		release = func() { w.bodies.release(p) }
		_ = connection.SetReadDeadline(time.Now().Add(bodyTimeout))
		text, err = readRest(text, from, r.ContentLength)
		w.bodies.settle(p)
	}
	if err != nil {
		release()
		if errors.As(err, new(*http.MaxBytesError)) {
			return failed(tooLarge())
		}
		return failed(invalid(http.StatusBadRequest, fmt.Sprintf("reading the request: %v", err)))
	}
	_ = connection.SetReadDeadline(time.Time{}) // otherwise the server would take an expired deadline for the end of the client
	return body{text, large, release}, nil
}

// readRest reads the rest of a text, and returns the whole text. beginning was read before. length is the length of the
// whole text, -1 if it is unknown.
func readRest(beginning []byte, from io.Reader, length int64) ([]byte, error) {
	if length < 0 {
		return io.ReadAll(io.MultiReader(bytes.NewReader(beginning), from))
	}
	text := make([]byte, length)
	_, err := io.ReadFull(from, text[copy(text, beginning):])
	return text, err
}

func busy() answer {
	return answer{http.StatusServiceUnavailable, outcomeBusy, []byte("the webhook is busy with other pods: run more replicas of nametap-discovery")}
}

func tooLarge() answer {
	return invalid(http.StatusRequestEntityTooLarge, fmt.Sprintf("the request is too large: want at most %d MiB", maxBody>>20))
}
