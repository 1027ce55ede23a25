package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/nds"
)

// A statusServer serves the endpoints for probes, metrics and the other commands of nametap: endpoints for all clients
// on the status address, and private endpoints on a unix socket. It serves until the end of the drain.
type statusServer struct {
	core      *core
	diagnosis *diagnosis
	dumps     dumps
	public    *statusPart // on the status address
	private   *statusPart // nil without a directory for its socket

	reading sync.Mutex     // held while the state of capture is read
	capture *CaptureStatus // guarded by reading: as it was read last
	read    time.Time      // guarded by reading: when that was

	ending context.Context // ends before Run waits for the requests in flight
	end    context.CancelFunc
}

// newStatusServer opens the parts. It returns an error if the status address is wrong. If another program has the
// address, or if the private socket cannot be opened, Run opens the part later.
func newStatusServer(ctx context.Context, d *diagnosis, registry *prometheus.Registry) (*statusServer, error) {
	c := d.core
	s := &statusServer{core: c, diagnosis: d, dumps: newDumps()}
	s.ending, s.end = context.WithCancel(context.WithoutCancel(ctx))
	public := http.NewServeMux()
	s.handlePublic(public, promhttp.HandlerFor(registry, promhttp.HandlerOpts{CoalesceGather: true}))
	public.Handle("/", s.elsewhere())
	var err error
	s.public, err = s.open(ctx, registry, public, listen.Spec{
		Name: "the status address", Setting: statusSetting, Addr: c.config.StatusAddr, Networks: []string{"tcp"}, Keep: true,
	})
	if err != nil {
		return nil, err
	}
	if len(c.config.SocketDirs) > 0 {
		private := http.NewServeMux()
		s.handlePublic(private, promhttp.HandlerFor(registry, promhttp.HandlerOpts{CoalesceGather: true}))
		s.handlePrivate(private)
		s.private, err = s.open(ctx, registry, private, listen.Spec{
			Name: "the private socket", Listen: func(context.Context) (net.Listener, error) {
				return listenPrivate(SocketPaths(c.config.SocketDirs, s.addr()))
			},
		})
		if err != nil {
			return nil, err
		}
	}
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "nametap_unserved_addresses", Help: "Addresses of the agent, besides those for DNS, that cannot be opened; retried.",
	}, func() float64 { return float64(len(s.unserved())) }))
	return s, nil
}

// handlePublic declares the endpoints for all clients.
func (s *statusServer) handlePublic(mux *http.ServeMux, metrics http.Handler) {
	mux.HandleFunc("GET /healthz/ready", s.handleReady)
	mux.HandleFunc("GET /healthz/live", s.handleLive)
	mux.Handle("GET /metrics", metrics)
	mux.Handle("GET /stats/prometheus", metrics)
}

// handlePrivate declares the endpoints for root and the agent's user: these endpoints show the queries of all users,
// and can end the agent.
func (s *statusServer) handlePrivate(mux *http.ServeMux) {
	mux.Handle("GET /debug/ndsz", s.dumps.limited(s.handleTable))
	mux.HandleFunc("GET /debug/explain", s.handleExplain)
	mux.Handle("GET /debug/cache", s.dumps.limited(s.handleCache))
	mux.HandleFunc("POST /cache/flush", s.handleCacheFlush)
	mux.HandleFunc("GET /debug/tail", s.handleTail)
	mux.HandleFunc("GET /debug/status", s.handleStatus)
	mux.HandleFunc("GET /debug/guard", s.handleGuard)
	mux.HandleFunc("GET /debug/settings", s.handleSettings)
	mux.HandleFunc("POST /drain", s.handleDrain)
	mux.HandleFunc("POST /quitquitquit", s.handleQuit)
}

// elsewhere returns a handler that refuses requests for private endpoints, and says which socket answers them.
func (s *statusServer) elsewhere() http.Handler {
	private := http.NewServeMux()
	s.handlePrivate(private)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := private.Handler(r); pattern == "" {
			http.NotFound(w, r)
			return
		}
		where := "a unix socket, which this agent does not have"
		if s.private != nil {
			where = "the unix socket " + s.private.addr()
		}
		http.Error(w, "for root and the user of the agent only, on "+where, http.StatusForbidden)
	})
}

// open opens a part.
func (s *statusServer) open(
	ctx context.Context, registry *prometheus.Registry, handler http.Handler, spec listen.Spec,
) (*statusPart, error) {
	spec.Log = s.core.log
	set, err := listen.New(spec, s.core.config.Inherited)
	if err == nil {
		err = set.Open(ctx)
	}
	if err != nil {
		return nil, err
	}
	server := "status"
	if spec.Listen != nil {
		server = "socket"
	}
	p := &statusPart{
		Set: set, name: spec.Name, handler: handler, private: spec.Listen != nil, log: s.core.log,
		limit: connlimit.New(server, maxStatusConns, 0),
	}
	registry.MustRegister(p.limit.Metric())
	return p, nil
}

// Run serves until ctx ends and the requests in flight are done.
func (s *statusServer) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.end)()
	defer s.end()
	var group errgroup.Group
	for _, p := range s.parts() {
		group.Go(func() error { return p.run(ctx) })
	}
	return group.Wait()
}

// parts returns all parts.
func (s *statusServer) parts() []*statusPart {
	if s.private == nil {
		return []*statusPart{s.public}
	}
	return []*statusPart{s.public, s.private}
}

// unserved returns a text for each address that cannot be opened, with the reason. It leaves out DNS addresses.
func (s *statusServer) unserved() (texts []string) {
	add := func(name string, set *listen.Set) {
		for _, err := range set.Missing() {
			texts = append(texts, name+": "+err.Error())
		}
	}
	for _, p := range s.parts() {
		add(p.name, p.Set)
	}
	if s.core.vips != nil {
		add("connections to VIPs", s.core.vips.Listeners())
	}
	return texts
}

// addr returns the host:port of the endpoints for all clients. If they are not open, it returns the configured
// status address.
func (s *statusServer) addr() string {
	return cmp.Or(s.public.addr(), s.core.config.StatusAddr)
}

const (
	// maxStatusConns is the largest number of connections to the status address, and to the private socket. Every host
	// that reaches this host can connect to the status address.
	maxStatusConns = 64
	// statusGrace is how long requests in flight may take at the end.
	statusGrace = time.Second
)

// A statusPart is a part of the status server with its own listeners. If one cannot be opened, or fails, it is opened
// again. Meanwhile the agent runs without it, because DNS does not need it.
type statusPart struct {
	*listen.Set

	name    string // the name of the part in texts
	handler http.Handler
	private bool // whether only root and the agent's user may use the part
	limit   *connlimit.Limit
	log     *slog.Logger
}

// addr returns the address of the first listener that is open, "" if there is none.
func (p *statusPart) addr() string {
	for _, addr := range p.Addrs() {
		return addr.Address
	}
	return ""
}

// run serves until ctx ends and the requests in flight are done.
func (p *statusPart) run(ctx context.Context) error {
	defer p.limit.Close()
	return p.Serve(ctx, func(ctx context.Context, socket *listen.Socket) error {
		server, listener := httpguard.New(p.handler, socket.Conn.(net.Listener), p.limit, p.log) //nolint:forcetypeassert // of network tcp or unix
		server.SetKeepAlivesEnabled(p.private)                                                   // elsewhere one client could send any number of requests at once
		return httpguard.Serve(ctx, server, listener, statusGrace)
	})
}

func (s *statusServer) handleLive(w http.ResponseWriter, r *http.Request) {
	if err := s.core.hangError(r.Context()); err != nil {
		http.Error(w, "no DNS listener answers: "+err.Error(), http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "live") // fails only if the client has disconnected
}

// userHeader is the header with the user and the group of the agent's process, as UID:GID.
// `nametap capture apply` compares user and group with the rules.
const userHeader = "Nametap-User"

func (s *statusServer) handleReady(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(userHeader, fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()))
	switch reason := s.core.notReady(); {
	case s.core.draining.Load():
		http.Error(w, reason, http.StatusServiceUnavailable)
	case reason != "":
		http.Error(w, reason+s.problems(), http.StatusServiceUnavailable)
	default:
		_, _ = fmt.Fprintln(w, "ready"+s.problems()) // fails only if the client has disconnected
	}
}

// problems returns a line for each problem. All users may read the lines, so they name no query.
func (s *statusServer) problems() string {
	var text strings.Builder
	for _, p := range s.diagnosis.problems() {
		fmt.Fprintf(&text, "\n%s: %s: %s", p.Severity, p.Code, p.What)
	}
	return text.String()
}

// Status is the state of an agent, as `nametap status` shows it.
type Status struct {
	Ready   bool            `json:"ready"`
	Reason  string          `json:"reason,omitempty"` // why the agent is not ready
	Uptime  float64         `json:"uptimeSeconds"`
	Version string          `json:"version"`
	DNS     []dnsproxy.Addr `json:"dns"`
	// Conditions has what the parts of the agent have found out about themselves.
	Conditions []condition.Condition `json:"conditions"`
	// Settings has, by name, the DNS settings in use that can change while the agent runs and that differ from their
	// defaults.
	Settings  map[string][]string `json:"settings,omitempty"`
	Upstreams []Upstream          `json:"upstreams"`
	Hosts     int                 `json:"hosts"`
	XDS       nds.Status          `json:"xds"`
	Capture   *CaptureStatus      `json:"capture,omitempty"` // nil: the agent installs no rules itself
	// OnlyNameserverOf is the path of resolv.conf if the file names only the agent: then no rules are needed. It is
	// "" if Capture is set.
	OnlyNameserverOf string `json:"onlyNameserverOf,omitempty"`
	// Redirected is for an agent whose rules another process installs, as in a pod. It says whether queries are
	// redirected to the agent. It is nil if Capture or OnlyNameserverOf is set.
	Redirected []probe.Result `json:"redirected,omitempty"`
	// Guard is the state of the guard; nil without one.
	Guard *GuardStatus `json:"guard,omitempty"`
	// Egress is the state of connections to automatic VIPs; nil if the agent carries none.
	Egress *egress.Status `json:"egress,omitempty"`
}

// Upstream is the state of a nameserver that is, or was, configured.
type Upstream struct {
	Server string `json:"server"`
	// State is up, down, looping, unknown before the first reply, or self: the server is this agent, which does not query
	// itself. LastReplyAt is when the last reply came.
	State        string    `json:"state"`
	LastReplyAt  time.Time `json:"lastReplyAt,omitzero"`
	RTT          float64   `json:"rttSeconds,omitempty"` // smoothed; 0 before the first reply
	Requests     uint64    `json:"requests"`
	Failures     uint64    `json:"failures"` // requests without a reply
	WrongReplies uint64    `json:"wrongReplies"`
	Hedges       uint64    `json:"hedges"` // requests to this server because another server was slow
	// Responses counts the replies by response code: NOERROR, NXDOMAIN, SERVFAIL, REFUSED or
	// "other". Codes that the nameserver has not sent are left out.
	Responses map[string]uint64 `json:"responses,omitempty"`
	// Refusing is true if at least the last ten replies, for names of at least three domains, were failures: they had
	// response codes other than NOERROR and NXDOMAIN, or could not be used. If another nameserver has already failed
	// for the same query, a failure does not count.
	Refusing    bool      `json:"refusing,omitempty"`
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
}

// ParamAsk is a parameter of /debug/status: the agent first asks each nameserver whether it replies, for up to 2 s.
const ParamAsk = "ask"

func (s *statusServer) handleStatus(w http.ResponseWriter, r *http.Request) {
	c := s.core
	if r.URL.Query().Has(ParamAsk) {
		c.proxy.AskNameservers(r.Context())
	}
	silent := probe.Errors(probe.Listeners(r.Context(), c.proxy.Addrs()...))
	status := Status{
		Reason: c.notReady(), Uptime: (time.Since(c.started) + c.clock.Slept()).Round(time.Second).Seconds(),
		Version: c.config.DNS.Version, DNS: c.proxy.Addrs(),
		Upstreams: upstreams(c.proxy), XDS: c.client.Status(),
	}
	if c.capture != nil {
		status.Capture = s.captureStatus(r.Context())
	} else if status.OnlyNameserverOf = OnlyNameserverOf(c.config.DNS.Forward.ResolvConf, addrPorts(c.proxy)); status.OnlyNameserverOf == "" {
		status.Redirected = probe.Redirections(r.Context(), slices.DeleteFunc(family.All(), func(f family.Family) bool {
			return !slices.ContainsFunc(addrPorts(c.proxy), func(at netip.AddrPort) bool { return family.Of(at.Addr()) == f })
		}))
	}
	status.Conditions = s.diagnosis.read(silent)
	status.Ready = status.Reason == ""
	if c.config.DNSSettings != nil {
		status.Settings = c.config.DNSSettings()
	}
	if table := c.proxy.Table(); table != nil {
		status.Hosts = table.Len()
	}
	if c.vips != nil {
		carried := c.vips.Status()
		status.Egress = &carried
	}
	status.Guard = c.guardStatus()
	writeJSON(w, status)
}

// captureStatus reads the state of capture, once for all requests of a second: it runs programs. The end of ctx does not
// end the reading, because other requests may wait for it.
func (s *statusServer) captureStatus(ctx context.Context) *CaptureStatus {
	s.reading.Lock()
	defer s.reading.Unlock()
	if s.capture == nil || time.Since(s.read) >= time.Second {
		s.capture, s.read = s.core.capture.status(context.WithoutCancel(ctx)), time.Now()
	}
	return s.capture
}

// upstreams returns the state of every nameserver.
func upstreams(proxy *dnsproxy.Server) []Upstream {
	all := []Upstream{}
	for _, s := range proxy.UpstreamStatus() {
		u := Upstream{
			Server: s.Spec.String(), State: s.State.String(), Requests: s.Requests, Failures: s.Failures,
			WrongReplies: s.Wrong + s.Malformed, Hedges: s.Hedges, Responses: s.Responses, Refusing: s.Refusing,
			LastError: cmp.Or(s.Looping, s.LastError), LastErrorAt: s.LastErrorAt, LastReplyAt: s.Heard,
		}
		if s.State == upstream.Up && s.Heard.IsZero() {
			u.State = "unknown"
		}
		maps.DeleteFunc(u.Responses, func(_ string, n uint64) bool { return n == 0 })
		u.RTT = s.RTT.Round(10 * time.Microsecond).Seconds()
		all = append(all, u)
	}
	for _, spec := range proxy.SelfUpstreams() {
		all = append(all, Upstream{Server: spec.String(), State: "self"})
	}
	return all
}

// handleSettings shows the settings in use.
func (s *statusServer) handleSettings(w http.ResponseWriter, _ *http.Request) {
	values := map[string][]string{}
	if settings := s.core.config.Settings; settings != nil {
		values = settings()
	}
	writeJSON(w, values)
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
	explanation, err := s.core.proxy.Explain(name, qtype)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, explanation)
}

// handleTable shows the table in the format of Istio's agent, for the scripts that read it.
// With ?collisions=1 it shows the entries that were skipped and the names that two hosts claim.
func (s *statusServer) handleTable(w *dump, r *http.Request) {
	current := s.core.proxy.Table()
	w.Header().Set("Content-Type", "application/json")
	if current == nil {
		w.WriteHeader(http.StatusNotFound)
		w.text("{}\n")
		return
	}
	if r.URL.Query().Has("collisions") {
		w.text("{\n  \"skipped\": [")
		writeList(w, current.Skipped())
		w.text("],\n  \"collisions\": [")
		writeList(w, current.Collisions())
		w.text("]\n}\n")
		return
	}
	w.text("{\n  \"table\": {")
	first := true
	for key, info := range current.Infos {
		name, err := json.Marshal(key)
		value, infoErr := protojson.Marshal(info)
		if err != nil || infoErr != nil {
			panic(http.ErrAbortHandler) // never: all texts of a table are UTF-8
		}
		w.entry(first, string(name)+": ", value)
		first = false
	}
	w.text("\n  }\n}\n")
}

// maxCacheEntries bounds how many entries /debug/cache shows. With it, the response has at most a few megabytes.
const maxCacheEntries = 10_000

func (s *statusServer) handleCache(w *dump, r *http.Request) {
	content, err := s.core.proxy.CacheContent(selection(r), maxCacheEntries)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.text(fmt.Sprintf("{\n  \"total\": %d,\n  \"entries\": [", content.Total))
	writeList(w, content.Entries)
	w.text("]\n}\n")
}

// Flushed is the number of questions that were removed from the cache.
type Flushed struct {
	Flushed int `json:"flushed"`
}

// selection returns the questions that a request selects: the questions for a name, for
// names below a suffix, or all.
func selection(r *http.Request) forward.CacheSelection {
	query := r.URL.Query()
	return forward.CacheSelection{Name: query.Get("name"), Suffix: query.Get("suffix")}
}

func (s *statusServer) handleCacheFlush(w http.ResponseWriter, r *http.Request) {
	n, err := s.core.proxy.FlushCache(selection(r))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, Flushed{Flushed: n})
}

// handleTail sends queries after they were answered, one line of JSON for each, until the client disconnects or gives
// way to another one, or the agent ends.
func (s *statusServer) handleTail(w http.ResponseWriter, r *http.Request) {
	params := r.URL.Query()
	filter, err := seen.ParseFilter(params)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	since, err := parseSince(params.Get(ParamSince))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	reader := s.core.proxy.Read(filter)
	defer reader.Close()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.ending, cancel)()
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := tail{w, http.NewResponseController(w), json.NewEncoder(w)}
	if !since.IsZero() && out.send(reader.Past(since), 0) != nil {
		return
	}
	if params.Has(ParamOnce) {
		return
	}
	err = out.send(nil, 0) // sends the header at once: the client then knows that the request was accepted
	for err == nil {
		var records []seen.Record
		var lost uint64
		if records, lost, err = reader.Next(ctx); err == nil {
			err = out.send(records, lost)
		}
	}
}

// handleDrain makes the agent report that it is not ready. The agent still answers queries. So a load balancer or a
// script can stop using the agent before it ends.
func (s *statusServer) handleDrain(w http.ResponseWriter, _ *http.Request) {
	s.core.draining.Store(true)
	_, _ = fmt.Fprintln(w, "draining")
}

func (s *statusServer) handleQuit(w http.ResponseWriter, _ *http.Request) {
	s.core.quit()
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
