package fakexds

import (
	"context"
	"errors"
	"io"
	"slices"
	"strconv"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// stream is one open stream of either variant.
type stream struct {
	id     int
	header metadata.MD
	proof  string

	// queue and subscribed are guarded by Server.mu. queue holds what is to be sent; wake
	// holds a value when the queue may not be empty. The first request sets subscribed.
	queue      []*response
	wake       chan struct{}
	subscribed bool

	// ended receives the error with which the stream is to end.
	ended chan error
}

// queueLocked queues r for sending.
func (st *stream) queueLocked(r *response) {
	st.queue = append(st.queue, r)
	select {
	case st.wake <- struct{}{}:
	default:
	}
}

// end makes the handler of the stream return err. If an earlier call has already ended the stream, it does nothing.
func (st *stream) end(err error) {
	select {
	case st.ended <- err:
	default:
	}
}

// variant holds what differs between the two RPCs.
type variant struct {
	recv func() (Request, error)
	send func(r *response, nonce string) error
	// hasResponse reports whether r holds a response for this variant.
	hasResponse func(r *response) bool
	// resendsState is true if a request without a nonce is answered with the state.
	resendsState bool
}

// DeltaAggregatedResources serves the incremental variant.
func (s *Server) DeltaAggregatedResources(rpc discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	if s.opts.NoDelta {
		return status.Error(codes.Unimplemented, "unknown method DeltaAggregatedResources")
	}
	return s.serve(rpc.Context(), variant{
		recv: func() (Request, error) {
			m, err := rpc.Recv()
			return Request{Delta: m}, err
		},
		send: func(r *response, nonce string) error {
			m := proto.CloneOf(r.delta)
			m.Nonce = nonce
			return rpc.Send(m)
		},
		hasResponse: func(r *response) bool { return r.delta != nil },
	})
}

// StreamAggregatedResources serves the state-of-the-world variant.
func (s *Server) StreamAggregatedResources(rpc discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return s.serve(rpc.Context(), variant{
		recv: func() (Request, error) {
			m, err := rpc.Recv()
			return Request{SotW: m}, err
		},
		send: func(r *response, nonce string) error {
			m := proto.CloneOf(r.sotw)
			m.Nonce = nonce
			return rpc.Send(m)
		},
		hasResponse:  func(r *response) bool { return r.sotw != nil },
		resendsState: true,
	})
}

// serve runs a stream until the client or the test ends it.
func (s *Server) serve(ctx context.Context, v variant) error {
	st, err := s.open(ctx)
	if err != nil {
		return err
	}
	defer s.close(st)
	go s.receive(st, v)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-st.ended:
			return err
		case <-st.wake:
		}
		if err := s.flush(st, v); err != nil {
			return err
		}
	}
}

// open registers a stream, if its client authenticates.
func (s *Server) open(ctx context.Context) (*stream, error) {
	st := &stream{wake: make(chan struct{}, 1), ended: make(chan error, 1)}
	st.header, _ = metadata.FromIncomingContext(ctx)
	var err error
	if st.proof, err = s.authenticate(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streamCount++
	st.id = s.streamCount
	s.streams[st] = struct{}{}
	return st, nil
}

// authenticate returns how the caller authenticates: "certificate", "token", or "" if that
// is not required. As with istiod, a caller with a certificate needs no token.
func (s *Server) authenticate(ctx context.Context) (string, error) {
	header, _ := metadata.FromIncomingContext(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case hasCertificate(ctx) && s.opts.RefuseCertificates:
		return "", status.Error(codes.PermissionDenied, "authorization failed")
	case hasCertificate(ctx):
		return "certificate", nil
	case s.token == "":
		return "", nil
	case slices.Equal(header.Get("authorization"), []string{"Bearer " + s.token}):
		return "token", nil
	}
	return "", status.Error(codes.Unauthenticated, "authentication failure")
}

// close removes a stream.
func (s *Server) close(st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, st)
}

// receive records and answers the client's requests. It returns after the handler has
// returned, because then the RPC's Recv fails.
func (s *Server) receive(st *stream, v variant) {
	for {
		req, err := v.recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil // the client closed its side
			}
			st.end(err)
			return
		}
		req.Stream, req.Header, req.Proof = st.id, st.header, st.proof
		if err := s.record(st, req, v); err != nil {
			st.end(err)
			return
		}
	}
}

// record records req and queues the response to it.
func (s *Server) record(st *stream, req Request, v variant) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	req.Version = s.versions[req.Nonce()]
	s.requests = append(s.requests, req)
	close(s.changed)
	s.changed = make(chan struct{})

	if s.opts.EndAfterAnswer && req.Nonce() != "" {
		return status.Error(codes.Unavailable, "ended after the answer")
	}
	first := !st.subscribed
	if first && req.Node() == nil {
		return status.Error(codes.InvalidArgument, "missing node information")
	}
	if req.TypeURL() != TypeURL {
		return nil
	}
	st.subscribed = true
	if s.state != nil && (first || v.resendsState && req.Nonce() == "") {
		st.queueLocked(s.state)
	}
	return nil
}

// flush sends the queued responses.
func (s *Server) flush(st *stream, v variant) error {
	s.mu.Lock()
	queue := st.queue
	st.queue = nil
	s.mu.Unlock()
	for _, r := range queue {
		if !v.hasResponse(r) {
			continue
		}
		if err := v.send(r, s.nextNonce(r.version)); err != nil {
			return err
		}
	}
	return nil
}

// nextNonce returns a new nonce and records the version that is sent with it.
func (s *Server) nextNonce(version string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nonce++
	nonce := "nonce-" + strconv.Itoa(s.nonce)
	s.versions[nonce] = version
	return nonce
}
