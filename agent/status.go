package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/nds"
)

// maxStatusConns is the most connections to the status endpoints, to which every host that
// reaches this one can connect.
const maxStatusConns = 64

// A statusServer serves the endpoints for probes, metrics and the other commands of nametap.
// It serves until the end of the drain, so that the drain can be watched.
type statusServer struct {
	agent    *Agent
	listener net.Listener
	server   *http.Server
}

func newStatusServer(ctx context.Context, a *Agent, registry *prometheus.Registry) (*statusServer, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", a.config.StatusAddr)
	if err != nil {
		return nil, fmt.Errorf("status address %q: want a host:port that is free (--status-addr): %w", a.config.StatusAddr, err)
	}
	s := &statusServer{agent: a}
	metrics := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz/ready", s.handleReady)
	mux.HandleFunc("GET /healthz/live", s.handleLive)
	mux.Handle("GET /metrics", metrics)
	mux.Handle("GET /stats/prometheus", metrics)
	mux.Handle("GET /debug/ndsz", httpguard.LocalOnly(s.handleTable))
	mux.Handle("GET /debug/explain", httpguard.LocalOnly(s.handleExplain))
	mux.Handle("GET /debug/cache", httpguard.LocalOnly(s.handleCache))
	mux.Handle("POST /cache/flush", httpguard.LocalOnly(s.handleCacheFlush))
	mux.Handle("GET /debug/status", httpguard.LocalOnly(s.handleStatus))
	mux.Handle("POST /drain", httpguard.LocalOnly(s.outsideService(s.handleDrain)))
	mux.Handle("POST /quitquitquit", httpguard.LocalOnly(s.outsideService(s.handleQuit)))
	s.server, s.listener = httpguard.New(mux, listener, maxStatusConns, a.log)
	return s, nil
}

// statusGrace is how long requests in flight may take at the end.
const statusGrace = time.Second

// Run serves until ctx ends and the requests in flight are done.
func (s *statusServer) Run(ctx context.Context) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), statusGrace)
		defer cancel()
		if s.server.Shutdown(grace) != nil {
			_ = s.server.Close() // of connections whose clients do not read
		}
	})
	err := s.server.Serve(s.listener)
	if !stop() {
		<-stopped // Serve returns when Shutdown begins
	}
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("the status listener on %s failed: %w", s.Addr(), err)
	}
	return nil
}

// Addr returns the host:port that the endpoints are on.
func (s *statusServer) Addr() string { return s.listener.Addr().String() }

func (s *statusServer) handleLive(w http.ResponseWriter, r *http.Request) {
	if err := s.agent.hangs(r.Context()); err != nil {
		http.Error(w, "no DNS listener answers: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "live") // fails only if the client has disconnected
}

// hangs returns an error if queries to the open UDP listeners get no answer, so that a restart
// would help. An agent that starts or ends does not hang.
func (a *Agent) hangs(ctx context.Context) error {
	select {
	case <-a.proxy.Ready():
	default:
		return nil
	}
	if a.draining.Load() {
		return nil
	}
	return anyAnswers(ctx, udpListeners(a.proxy))
}

// userHeader is the header with the user and the group of the agent's process, as UID:GID.
// `capture apply` compares them with the rules.
const userHeader = "Nametap-User"

func (s *statusServer) handleReady(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(userHeader, fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()))
	if reason := s.agent.notReady(); reason != "" {
		http.Error(w, reason, http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ready") // fails only if the client has disconnected
}

// notReady returns the reason why queries should not be sent to this agent yet, or any longer.
// It is empty if they should.
func (a *Agent) notReady() string {
	if a.draining.Load() {
		return "draining"
	}
	select {
	case <-a.proxy.Ready():
	default:
		return "the DNS listeners are not open yet"
	}
	select {
	case <-a.proxy.Synced():
		return ""
	default:
	}
	if time.Since(a.started) >= a.config.ReadyTimeout {
		return ""
	}
	return "no table of mesh hosts has been received yet"
}

// handleTable shows the table in the format of Istio's agent, for the scripts that read it.
// With ?collisions=1 it shows the entries that were skipped and the names that two hosts claim.
func (s *statusServer) handleTable(w http.ResponseWriter, r *http.Request) {
	current := s.agent.proxy.Table()
	if current == nil {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = fmt.Fprintln(w, "{}")
		return
	}
	if r.URL.Query().Has("collisions") {
		writeJSON(w, Problems{
			Skipped:    append([]table.Skipped{}, current.Skipped()...), // [] rather than null
			Collisions: append([]table.Collision{}, current.Collisions()...),
		})
		return
	}
	text, err := protojson.Marshal(current.NameTable())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, json.RawMessage(text))
}

// Problems are the problems of the table in use.
type Problems struct {
	Skipped    []table.Skipped   `json:"skipped"`
	Collisions []table.Collision `json:"collisions"`
}

func (s *statusServer) handleExplain(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	name, qtype := query.Get("name"), query.Get("type")
	if name == "" {
		http.Error(w, "want ?name=NAME and, if not A, &type=TYPE", http.StatusBadRequest)
		return
	}
	if qtype == "" {
		qtype = "A"
	}
	explanation, err := s.agent.proxy.Explain(name, qtype)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, explanation)
}

// Status is the state of an agent, as `nametap status` shows it.
type Status struct {
	Ready     bool            `json:"ready"`
	Reason    string          `json:"reason,omitempty"` // why it is not ready
	Uptime    string          `json:"uptime"`
	DNS       []dnsproxy.Addr `json:"dns"`
	Silent    []string        `json:"silent,omitempty"` // why DNS listeners do not answer
	Upstreams []Upstream      `json:"upstreams"`
	Hosts     int             `json:"hosts"`
	XDS       nds.Status      `json:"xds"`
	Capture   *CaptureStatus  `json:"capture,omitempty"` // nil: the agent installs no rules itself
	// OnlyNameserverOf is the resolv.conf whose only nameserver is the agent, so that no rules are
	// needed. It is "" with Capture.
	OnlyNameserverOf string `json:"onlyNameserverOf,omitempty"`
	// Redirected says what is captured if another process has installed the rules, as in a
	// pod. It is nil with Capture and with OnlyNameserverOf.
	Redirected []Redirection `json:"redirected,omitempty"`
	// Egress is the state of connections to automatic VIPs; nil if none are carried.
	Egress *egress.Status `json:"egress,omitempty"`
}

// Upstream is the state of a nameserver that is, or was, configured.
type Upstream struct {
	Server       string `json:"server"`
	State        string `json:"state"`         // up, failing, down or looping
	RTT          string `json:"rtt,omitempty"` // smoothed; empty before the first reply
	Requests     uint64 `json:"requests"`
	Failures     uint64 `json:"failures"` // requests without a reply
	WrongReplies uint64 `json:"wrongReplies"`
	Hedges       uint64 `json:"hedges"` // requests that were sent because another server was late
	LastError    string `json:"lastError,omitempty"`
}

// upstreams returns the state of every nameserver.
func upstreams(proxy *dnsproxy.Server) []Upstream {
	all := []Upstream{}
	for _, s := range proxy.UpstreamStatus() {
		u := Upstream{
			Server: s.Spec.String(), State: s.State.String(), Requests: s.Requests, Failures: s.Failures,
			WrongReplies: s.Wrong + s.Malformed, Hedges: s.Hedges, LastError: s.LastError,
		}
		if s.RTT > 0 {
			u.RTT = s.RTT.Round(10 * time.Microsecond).String()
		}
		all = append(all, u)
	}
	return all
}

func (s *statusServer) handleStatus(w http.ResponseWriter, r *http.Request) {
	a := s.agent
	status := Status{
		Reason: a.notReady(), Uptime: (time.Since(a.started) + a.clock.Slept()).Round(time.Second).String(),
		DNS: a.proxy.Addrs(), Silent: silent(r.Context(), a.proxy.Addrs()), Upstreams: upstreams(a.proxy), XDS: a.client.Status(),
	}
	status.Ready = status.Reason == ""
	if table := a.proxy.Table(); table != nil {
		status.Hosts = table.Len()
	}
	if a.egress != nil {
		carried := a.egress.Status()
		status.Egress = &carried
	}
	if a.capture != nil {
		status.Capture = a.capture.status(r.Context())
	} else if status.OnlyNameserverOf = OnlyNameserverOf(a.config.DNS.Forward.ResolvConf, addrPorts(a.proxy)); status.OnlyNameserverOf == "" {
		status.Redirected = Redirections(r.Context(), listening(a.proxy))
	}
	writeJSON(w, status)
}

// handleDrain makes the agent not ready while it still answers, so that a load balancer or a
// script can remove it before it ends.
// outsideService refuses requests if the agent serves a whole host as a unit of systemd. The server
// cannot tell users of the host apart, and only root may stop the unit. In a pod, the programs
// belong together.
func (s *statusServer) outsideService(handle http.HandlerFunc) http.HandlerFunc {
	if !s.agent.config.Service {
		return handle
	}
	return func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "systemd runs this agent: use systemctl", http.StatusForbidden)
	}
}

func (s *statusServer) handleDrain(w http.ResponseWriter, _ *http.Request) {
	s.agent.draining.Store(true)
	_, _ = fmt.Fprintln(w, "draining")
}

func (s *statusServer) handleQuit(w http.ResponseWriter, _ *http.Request) {
	s.agent.quit()
	_, _ = fmt.Fprintln(w, "ending")
}

func writeJSON(w http.ResponseWriter, v any) {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintln(w, string(text)) // fails only if the client has disconnected
}

// maxCacheEntries limits the entries that /debug/cache shows, and so the response to a few
// megabytes.
const maxCacheEntries = 10_000

// Flushed is the number of questions that were removed from the cache.
type Flushed struct {
	Flushed int `json:"flushed"`
}

// selection returns the questions that a request selects: those of a name, those below a
// suffix, or all.
func selection(r *http.Request) forward.CacheSelection {
	query := r.URL.Query()
	return forward.CacheSelection{Name: query.Get("name"), Suffix: query.Get("suffix")}
}

func (s *statusServer) handleCache(w http.ResponseWriter, r *http.Request) {
	content, err := s.agent.proxy.CacheContent(selection(r), maxCacheEntries)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, content)
}

func (s *statusServer) handleCacheFlush(w http.ResponseWriter, r *http.Request) {
	n, err := s.agent.proxy.FlushCache(selection(r))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, Flushed{Flushed: n})
}
