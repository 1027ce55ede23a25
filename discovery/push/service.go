package push

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/hosts"
)

const (
	// firstReadWait is how long a stream waits for the first reading of all sources. If the server refused an agent at
	// once, the agent would connect again only after a pause of up to 30 s.
	firstReadWait = 10 * time.Second
	// maxRejections is the number of rejected pushes that are logged without a pause. After that, at most one line a
	// second is logged, because all agents reject a bad push.
	maxRejections = 100
)

// Config configures a [Service].
type Config struct {
	// Hosts are the hosts to send. The service owns them.
	Hosts *hosts.Hosts
	// Waiting returns why no table can be served yet, or "": clients that request one are sent this reason.
	Waiting func() string
	// FirstRead is closed when all sources have been read for the first time.
	FirstRead <-chan struct{}
	// AckTimeout is how long a client may take to request its table, and to acknowledge a push, before its stream ends.
	// Requests for other types do not count: Istio's agent sends the requests of its Envoy on the same stream.
	AckTimeout time.Duration
	// Check returns an error if a client may not claim to be a node. The parameter namespace is the namespace that the
	// node names, and ctx is the context of the client's stream. The error ends the stream. If Check is nil, nothing is
	// checked.
	Check func(ctx context.Context, node *corev3.Node, namespace string) error
	// Room returns an error if there is no memory for another table. It is called before a client is the first to get a large
	// resource that not all namespaces share. The error ends the client's stream. If Room is nil, there is always room.
	Room func() error
	// Replica is the name of this replica of the control plane, for [Agent.Replica].
	Replica string
	// Logger is for logs.
	Logger *slog.Logger
}

// A Service sends tables to clients, in both variants of ADS.
type Service struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	cfg     Config
	metrics *metrics
	tables  *tables
	rounds  *broadcaster
	streams sync.Map // the open streams: each *session is a key

	stopped    context.Context //nolint:containedctx // it ends when Stop is called
	stop       context.CancelFunc
	handlers   sync.WaitGroup // of streams
	rejections rate.Sometimes // limits the log lines about clients that reject a push
}

// New returns a service that sends changes only while [Service.Run] runs.
func New(cfg Config) *Service {
	s := &Service{cfg: cfg, tables: newTables(cfg.Hosts, cfg.Waiting), rounds: &broadcaster{nonEmpty: make(chan struct{}, 1)}, metrics: newMetrics()}
	s.stopped, s.stop = context.WithCancel(context.Background())
	s.rejections = rate.Sometimes{First: maxRejections, Interval: time.Second}
	return s
}

// SetMissing sets which clusters have no objects, and why. The clients in these clusters are sent no table, because
// they would lose the hosts of their own cluster.
func (s *Service) SetMissing(clusters map[string]string) {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	s.tables.missing = clusters
}

// Update applies changes of the objects, and sends each client what has changed for it. Before it sends anything, it
// calls report with the result. So report can log errors in the objects before a client gets a table of these objects.
// While report runs, the earlier tables are still served.
func (s *Service) Update(changes []hosts.Change, report func(hosts.Update, hosts.Counts)) hosts.Update {
	u, woken := s.tables.update(changes, report)
	s.rounds.add(woken)
	return u
}

// ProxyMetadata returns the environment variables that all proxies of the mesh have.
func (s *Service) ProxyMetadata() map[string]string {
	s.tables.mu.Lock()
	defer s.tables.mu.Unlock()
	return s.tables.scene.ProxyMetadata()
}

// Run sends changes until ctx ends or the service is stopped. At the end of ctx it stops the service.
func (s *Service) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, s.stop)()
	sweeps := time.NewTicker(keepViews)
	defer sweeps.Stop()
	s.handlers.Go(func() {
		for {
			select {
			case <-s.stopped.Done():
				return
			case <-sweeps.C:
				s.tables.sweep()
			}
		}
	})
	s.rounds.run(s.stopped)
}

// Stop ends all streams.
func (s *Service) Stop() { s.stop() }

// Wait waits until all streams have ended, after Stop.
func (s *Service) Wait() { s.handlers.Wait() }

// StreamAggregatedResources serves a state-of-the-world stream.
func (s *Service) StreamAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return s.serve(stream.Context(), variantSotw, stream.RecvMsg, stream.SendMsg)
}

// DeltaAggregatedResources serves an incremental stream.
func (s *Service) DeltaAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return s.serve(stream.Context(), variantDelta, stream.RecvMsg, stream.SendMsg)
}

var (
	errStopping = status.Error(codes.Unavailable, "this control plane stops: connect to another one")
	errLate     = errors.New("late")
)

// serve serves a stream of either variant until it ends. The client can end the stream. serve ends it if the client is
// refused, if the client requests its table or acknowledges a push too late, or if the service stops.
func (s *Service) serve(ctx context.Context, variant string, receive, send func(any) error) error {
	running, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.stopped, func() { cancel(errStopping) })()
	client := &session{service: s, variant: variant, send: send, done: running.Done(), fail: cancel, connected: s.tables.elapsed()}
	if from, ok := peer.FromContext(ctx); ok {
		client.peer, client.tls = from.Addr.String(), from.AuthInfo != nil && from.AuthInfo.AuthType() == "tls"
	}
	if s.cfg.Check != nil {
		client.check = func(node *corev3.Node, namespace string) error { return s.cfg.Check(ctx, node, namespace) }
	}
	s.streams.Store(client, nil)
	client.timeout = time.AfterFunc(firstReadWait+s.cfg.AckTimeout, func() { cancel(errLate) })
	done := make(chan error, 1)
	s.handlers.Go(func() {
		defer client.end()
		defer s.streams.Delete(client)
		done <- s.receive(client, receive)
	})
	// Returning from here ends the stream. That ends a receive or a send that waits for the client, and
	// with it the goroutine.
	select {
	case err := <-done:
		return err
	case <-running.Done():
	}
	cause := context.Cause(running)
	if errors.Is(cause, errLate) {
		s.metrics.ended.WithLabelValues(endedSlow).Inc()
		return status.Errorf(codes.DeadlineExceeded, "no request for name tables, or no acknowledgement of the last push, within %v", s.cfg.AckTimeout)
	}
	return cause
}

// receive handles the requests of a stream until it ends.
func (s *Service) receive(client *session, next func(any) error) error {
	s.metrics.clients.WithLabelValues(client.variant).Inc()
	defer s.metrics.clients.WithLabelValues(client.variant).Dec()
	for {
		r := newRequest(client.delta())
		if err := next(r); err != nil {
			return err
		}
		if err := client.handle(r); err != nil {
			return err
		}
	}
}

// awaitFirstRead waits until all sources were read for the first time, until firstReadWait has passed, or until the
// channel done is closed.
func (s *Service) awaitFirstRead(done <-chan struct{}) {
	timer := time.NewTimer(firstReadWait)
	defer timer.Stop()
	select {
	case <-s.cfg.FirstRead:
	case <-timer.C:
	case <-done:
	}
}

// rejected counts and logs a NACK.
func (s *Service) rejected(variant, node, reason string) {
	s.metrics.rejected.WithLabelValues(variant).Inc()
	s.rejections.Do(func() {
		s.cfg.Logger.Warn("a client rejected a push and keeps its table", "node", cut(node), "variant", variant, "reason", cut(reason))
	})
}

// Agents returns the state of the clients that have a stream, of one namespace or, if namespace is "", of all
// namespaces. The clients are sorted by namespace, name and time of connection. Each state is read when the iteration
// reaches it. No lock is held while the caller handles a state.
func (s *Service) Agents(namespace string) iter.Seq[Agent] {
	return func(yield func(Agent) bool) {
		for _, one := range s.sorted(namespace) {
			if a, open := one.state(); open && !yield(a) {
				return
			}
		}
	}
}

// Metrics returns the metrics of the service, to register.
func (s *Service) Metrics() []prometheus.Collector {
	return []prometheus.Collector{s.metrics.clients, s.metrics.pushes, s.metrics.rejected, s.metrics.ended}
}

// TooMany counts a connection or stream that was refused because there are too many.
func (s *Service) TooMany() { s.metrics.ended.WithLabelValues(endedTooMany).Inc() }

// Refused counts a client that was refused because of its identity.
func (s *Service) Refused() { s.metrics.ended.WithLabelValues(endedRefused).Inc() }

// NoMemory counts a client that was refused because nearly all memory is in use.
func (s *Service) NoMemory() { s.metrics.ended.WithLabelValues(endedMemory).Inc() }

// Encode returns the encoded table of the clients with a view.
func Encode(all *hosts.Hosts, view hosts.View) []byte {
	viewer := all.Viewer(view)
	return contentOf(entriesOf(&viewer, slices.Collect(all.All())))
}

// sorted returns the open streams of a namespace, sorted for [Service.Agents]. If namespace is "", it returns all.
func (s *Service) sorted(namespace string) (all []*session) {
	s.streams.Range(func(key, _ any) bool {
		if one, ok := key.(*session); ok && (namespace == "" || one.said().view.Namespace == namespace) {
			all = append(all, one)
		}
		return true
	})
	slices.SortFunc(all, func(a, b *session) int {
		one, other := a.said(), b.said()
		return cmp.Or(cmp.Compare(one.view.Namespace, other.view.Namespace), cmp.Compare(one.name, other.name), cmp.Compare(a.connected, b.connected))
	})
	return all
}
