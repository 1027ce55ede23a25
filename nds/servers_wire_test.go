package nds_test

import (
	"context"
	"errors"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/discovery/push"
)

// A wire is a gRPC server in memory in front of an ADS service that can be exchanged. It disturbs their connections.
type wire struct {
	t       *testing.T
	noDelta bool // the incremental RPC is not implemented

	mu       sync.Mutex
	service  discoveryv3.AggregatedDiscoveryServiceServer
	server   *grpc.Server
	listener *bufconn.Listener
	conn     net.Conn            // the last connection
	open     map[chan error]bool // of each stream: receives the error with which the stream ends
	// The properties of connections from now on.
	gzip bool
	drip int // the bytes of a read; 0 for no bound
}

func startWire(t *testing.T, noDelta bool) *wire {
	t.Helper()
	w := &wire{t: t, noDelta: noDelta, open: map[chan error]bool{}}
	w.listen()
	t.Cleanup(w.stop)
	return w
}

// listen starts a server. Connections to an earlier one go on.
func (w *wire) listen() {
	pings := grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 15 * time.Second}) // istiod's
	server, listener := grpc.NewServer(grpc.StreamInterceptor(w.intercept), pings, grpc.ForceServerCodecV2(push.Codec())), bufconn.Listen(64<<10)
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(server, (*exchangeable)(w))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.server, w.listener = server, listener
	go func() { _ = server.Serve(notedListener{listener, w}) }() // an error only after stop
}

// stop closes all connections.
func (w *wire) stop() {
	w.mu.Lock()
	server := w.server
	w.mu.Unlock()
	server.Stop()
}

// goAway sends GOAWAY. The stream goes on; new connections are of a new server.
func (w *wire) goAway() {
	w.mu.Lock()
	server := w.server
	w.mu.Unlock()
	w.listen()
	go server.GracefulStop()
}

// cut ends all streams with an error of istiod. It returns when the service has noticed.
func (w *wire) cut() {
	w.mu.Lock()
	for end := range w.open {
		end <- status.Error(codes.Unavailable, "closing transport due to: max_age")
		delete(w.open, end)
	}
	w.mu.Unlock()
	synctest.Wait()
}

// reset ends the first two streams of the last connection with RST_STREAM. The server must be between two frames.
func (w *wire) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn == nil {
		return // the client has not connected yet
	}
	framer := http2.NewFramer(w.conn, nil)
	if err := errors.Join(framer.WriteRSTStream(1, http2.ErrCodeInternal), framer.WriteRSTStream(3, http2.ErrCodeInternal)); err != nil {
		w.t.Error(err)
	}
}

// dial connects to the server.
func (w *wire) dial(ctx context.Context, _ string) (net.Conn, error) {
	w.mu.Lock()
	listener, drip := w.listener, w.drip
	w.mu.Unlock()
	conn, err := listener.DialContext(ctx)
	if err != nil || drip == 0 {
		return conn, err
	}
	return drippingConn{conn, drip}, nil
}

// intercept passes a stream to the service until cut ends it.
func (w *wire) intercept(service any, rpc grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if w.noDelta && strings.HasSuffix(info.FullMethod, "DeltaAggregatedResources") {
		return status.Error(codes.Unimplemented, "unknown method DeltaAggregatedResources")
	}
	end := make(chan error, 2)
	w.mu.Lock()
	w.open[end] = true
	compress := w.gzip
	w.mu.Unlock()
	if compress {
		if err := grpc.SetSendCompressor(rpc.Context(), "gzip"); err != nil {
			return err
		}
	}
	go func() { end <- handler(service, rpc) }()
	err := <-end
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, end)
	return err
}

// An exchangeable passes a stream to the service that the wire has when the stream opens.
type exchangeable wire

func (e *exchangeable) current() discoveryv3.AggregatedDiscoveryServiceServer {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.service
}

func (e *exchangeable) DeltaAggregatedResources(s discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return e.current().DeltaAggregatedResources(s)
}

func (e *exchangeable) StreamAggregatedResources(s discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return e.current().StreamAggregatedResources(s)
}

// A notedListener notes the last connection.
type notedListener struct {
	net.Listener
	wire *wire
}

func (l notedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	l.wire.mu.Lock()
	defer l.wire.mu.Unlock()
	l.wire.conn = conn
	return conn, err
}

// A drippingConn receives a few bytes in a millisecond.
type drippingConn struct {
	net.Conn
	bytes int
}

func (c drippingConn) Read(b []byte) (int, error) {
	<-time.After(time.Millisecond)
	return c.Conn.Read(b[:min(len(b), c.bytes)])
}

// A scripted is a control plane that sends resources in the form of a kind. It sends a client what the client does not
// have: by the versions that the client announces and, later, by what it has sent.
type scripted struct {
	form

	mu        sync.Mutex
	resources map[string]*discoveryv3.Resource // by name
	sessions  map[*session]struct{}
	responses int
	announced map[string]string     // in the last first request
	greeting  *discoveryv3.Resource // an addition to the first response of the next stream; may be nil
}

// A form is how a kind of control plane sends a table.
type form struct {
	// resource makes the resource of a name.
	resource func(name string, hosts table) *discoveryv3.Resource
	// all makes each response have all resources. unversioned is true for named resources without a version: if the
	// first response is rejected, such a control plane does not know what the client has.
	all, unversioned bool
	// marker is the resource at the end of a response that replaces everything; nil if the kind has none.
	marker *discoveryv3.Resource
}

// A session is the service's side of a stream.
type session struct {
	send func(*discoveryv3.DeltaDiscoveryResponse) error
	all  bool
	// has says what was sent and not rejected: the version or, without one, the bytes, by name. before is has before
	// the last response.
	has, before map[string]string
	nonce       int
	pending     int // responses that were not answered
}

// sentAs returns what tells a resource from another one with the same name.
func sentAs(r *discoveryv3.Resource) string {
	if v := r.GetVersion(); v != "" {
		return v
	}
	return string(r.GetResource().GetValue())
}

func (s *scripted) set(all tables) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resources = map[string]*discoveryv3.Resource{}
	for name, hosts := range all {
		s.resources[name] = s.resource(name, hosts)
	}
	for session := range s.sessions {
		if response := s.differenceLocked(session); session.all || len(response.GetResources())+len(response.GetRemovedResources()) > 0 {
			s.sendLocked(session, response)
		}
	}
}

func (s *scripted) close() {}

// push sends a response as it is.
func (s *scripted) push(response *discoveryv3.DeltaDiscoveryResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for session := range s.sessions {
		s.sendLocked(session, response)
	}
}

// differenceLocked returns what a client does not have.
func (s *scripted) differenceLocked(to *session) *discoveryv3.DeltaDiscoveryResponse {
	response := &discoveryv3.DeltaDiscoveryResponse{TypeUrl: typeURL}
	for _, name := range sortedKeys(s.resources) {
		if r := s.resources[name]; to.all || to.has[name] != sentAs(r) {
			response.Resources = append(response.Resources, r)
		}
	}
	for _, name := range sortedKeys(to.has) {
		if _, ok := s.resources[name]; !ok {
			response.RemovedResources = append(response.RemovedResources, name)
		}
	}
	return response
}

func (s *scripted) sendLocked(to *session, response *discoveryv3.DeltaDiscoveryResponse) {
	response = proto.CloneOf(response)
	s.responses++
	response.SystemVersionInfo = strconv.Itoa(s.responses * 3 % 7) // versions go back, and come again
	to.nonce++
	to.pending++
	response.Nonce = strconv.Itoa(to.nonce)
	to.before = maps.Clone(to.has)
	for _, name := range response.GetRemovedResources() {
		delete(to.has, name)
	}
	for _, r := range response.GetResources() {
		if r.GetResource() != nil && r != s.marker {
			to.has[r.GetName()] = sentAs(r)
		}
	}
	_ = to.send(response) // the stream may have ended
}

// greet answers the first request of a stream.
func (s *scripted) greet(to *session, announced map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sessions[to], s.announced = struct{}{}, announced
	to.all, to.has = s.all, map[string]string{}
	if s.marker == nil {
		maps.Copy(to.has, announced)
	}
	response := s.differenceLocked(to)
	if s.marker != nil {
		response.Resources = append(response.Resources, s.marker)
	}
	if s.greeting != nil {
		response.Resources = append(response.Resources, s.greeting)
		s.greeting = nil
	}
	s.sendLocked(to, response)
}

func (s *scripted) leave(session *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, session)
}

// answered notes an answer to the last response.
func (s *scripted) answered(by *session, rejected bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if by.pending--; rejected {
		by.has = by.before
	}
}

// quiet reports whether there is a client, and has answered all responses.
func (s *scripted) quiet() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	quiet := len(s.sessions) > 0
	for session := range s.sessions {
		quiet = quiet && session.nonce > 0 && session.pending == 0
	}
	return quiet
}

// serve serves a stream of either variant, whose requests receive returns in incremental form.
func (s *scripted) serve(session *session, receive func() (*discoveryv3.DeltaDiscoveryRequest, error)) error {
	defer s.leave(session)
	for {
		request, err := receive()
		switch {
		case err != nil:
			return nil // the client has ended the stream
		case request.GetResponseNonce() == "":
			s.greet(session, request.GetInitialResourceVersions())
		default:
			s.answered(session, request.GetErrorDetail() != nil)
		}
	}
}

func (s *scripted) DeltaAggregatedResources(rpc discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return s.serve(&session{send: rpc.Send}, rpc.Recv)
}

func (s *scripted) StreamAggregatedResources(rpc discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	send := func(r *discoveryv3.DeltaDiscoveryResponse) error { return rpc.Send(worldOf(r)) }
	return s.serve(&session{send: send}, func() (*discoveryv3.DeltaDiscoveryRequest, error) {
		r, err := rpc.Recv()
		return &discoveryv3.DeltaDiscoveryRequest{ResponseNonce: r.GetResponseNonce(), ErrorDetail: r.GetErrorDetail()}, err
	})
}
