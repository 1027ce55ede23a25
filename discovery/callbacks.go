package discovery

import (
	"context"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
)

// The two variants of ADS, as the metrics call them.
const (
	variantSotw  = "sotw"
	variantDelta = "delta"
)

// callbacks count streams, pushes and refusals.
func (s *Server) callbacks() serverv3.Callbacks {
	sotwClients, deltaClients := s.metrics.clients.WithLabelValues(variantSotw), s.metrics.clients.WithLabelValues(variantDelta)
	sotwPushes, deltaPushes := s.metrics.pushes.WithLabelValues(variantSotw), s.metrics.pushes.WithLabelValues(variantDelta)
	return serverv3.CallbackFuncs{
		StreamOpenFunc:        func(context.Context, int64, string) error { sotwClients.Inc(); return nil },
		StreamClosedFunc:      func(int64, *corev3.Node) { sotwClients.Dec() },
		DeltaStreamOpenFunc:   func(context.Context, int64, string) error { deltaClients.Inc(); return nil },
		DeltaStreamClosedFunc: func(int64, *corev3.Node) { deltaClients.Dec() },
		StreamRequestFunc: func(_ int64, req *discoveryv3.DiscoveryRequest) error {
			s.refused(variantSotw, req.GetNode(), req.GetErrorDetail())
			return nil
		},
		StreamDeltaRequestFunc: func(_ int64, req *discoveryv3.DeltaDiscoveryRequest) error {
			s.refused(variantDelta, req.GetNode(), req.GetErrorDetail())
			return nil
		},
		StreamResponseFunc: func(context.Context, int64, *discoveryv3.DiscoveryRequest, *discoveryv3.DiscoveryResponse) {
			sotwPushes.Inc()
		},
		StreamDeltaResponseFunc: func(int64, *discoveryv3.DeltaDiscoveryRequest, *discoveryv3.DeltaDiscoveryResponse) {
			deltaPushes.Inc()
		},
	}
}

// refused logs a NACK: the client keeps its old table, and only here is it
// known that it does.
func (s *Server) refused(variant string, node *corev3.Node, detail *rpcstatus.Status) {
	if detail == nil {
		return
	}
	s.metrics.rejected.WithLabelValues(variant).Inc()
	s.cfg.Logger.Warn("a client refused a push and keeps its old table",
		"node", node.GetId(), "variant", variant, "reason", detail.GetMessage())
}
