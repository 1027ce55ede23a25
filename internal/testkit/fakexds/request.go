package fakexds

import (
	"context"
	"fmt"
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/metadata"
)

// Request is a received request. Either Delta or SotW is set.
type Request struct {
	// Stream is the number of the stream over the server's life, from 1.
	Stream int
	// Version is the version of the push that the request answers, "" if it answers none.
	Version string
	// Header is the metadata of the stream.
	Header metadata.MD
	// Proof is how the client authenticated when it opened the stream: "certificate",
	// "token", or "" if the server did not require it.
	Proof string

	Delta *discoveryv3.DeltaDiscoveryRequest
	SotW  *discoveryv3.DiscoveryRequest
}

// Nonce returns the nonce of the response that the request answers, or "".
func (r Request) Nonce() string {
	if r.Delta != nil {
		return r.Delta.GetResponseNonce()
	}
	return r.SotW.GetResponseNonce()
}

// Rejection returns the reason in a NACK, and nil for other requests.
func (r Request) Rejection() *rpcstatus.Status {
	if r.Delta != nil {
		return r.Delta.GetErrorDetail()
	}
	return r.SotW.GetErrorDetail()
}

// Node returns the node, or nil if the request has none.
func (r Request) Node() *corev3.Node {
	if r.Delta != nil {
		return r.Delta.GetNode()
	}
	return r.SotW.GetNode()
}

// TypeURL returns the type of the requested resources.
func (r Request) TypeURL() string {
	if r.Delta != nil {
		return r.Delta.GetTypeUrl()
	}
	return r.SotW.GetTypeUrl()
}

// Requests returns all requests so far, in the order of arrival.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Wait returns the first request, past or future, for which match returns true.
func (s *Server) Wait(ctx context.Context, match func(Request) bool) (Request, error) {
	seen := 0
	for {
		s.mu.Lock()
		requests, changed := s.requests, s.changed
		s.mu.Unlock()
		for ; seen < len(requests); seen++ {
			if match(requests[seen]) {
				return requests[seen], nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Request{}, fmt.Errorf("fakexds: none of %d requests is the expected one: %w", seen, ctx.Err())
		}
	}
}

// WaitAnswer returns the first ACK or NACK of the push with this version.
func (s *Server) WaitAnswer(ctx context.Context, version string) (Request, error) {
	return s.Wait(ctx, func(r Request) bool { return r.Nonce() != "" && r.Version == version })
}

// WaitStream returns the first request of the stream with this number.
func (s *Server) WaitStream(ctx context.Context, stream int) (Request, error) {
	return s.Wait(ctx, func(r Request) bool { return r.Stream == stream })
}
