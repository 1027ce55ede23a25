package nds

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// TypeURL is the type of the resources that the client subscribes to.
const TypeURL = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// maxReason bounds the reason in a NACK, because control planes log it.
const maxReason = 4 << 10

// A stream is one ADS stream and its protocol state, which the goroutine of Client.Run
// owns. Every stream starts with the zero values.
type stream struct {
	client *Client
	rpc    rpc
	cancel context.CancelFunc // ends the RPC

	// version is the version of the last accepted response; a rejected response leaves it
	// unchanged, so a NACK carries the previous version. (There is no field for the
	// nonce: every answer carries the nonce of the response that it answers.)
	version string
	// acceptedAt is when the first response was accepted; zero before that.
	acceptedAt time.Time
}

// run subscribes, then handles responses until the stream or ctx ends. It returns the reason of
// the end.
func (s *stream) run(ctx context.Context, node *corev3.Node) error {
	err := s.rpc.subscribe(node)
	for err == nil || errors.Is(err, io.EOF) {
		// A send returns EOF when the stream has ended; receive returns the reason.
		var r response
		if r, err = s.rpc.receive(); err != nil {
			return explainEnd(err)
		}
		s.client.setConnected(r.nonce)
		began := time.Now()
		if err = s.handle(r); differs(err) {
			s.end()
			return err
		}
		rest(ctx, time.Since(began))
	}
	return fmt.Errorf("sending a request: %w", err)
}

// After a push the client rests restFactor times as long as it took, at most maxRest: pushes take a
// tenth of a processor. An object with hosts in all shards makes agents build their whole table,
// and its author may change it again and again. All changes meanwhile come in one push.
const (
	restFactor = 9
	maxRest    = time.Second
)

// rest returns after the rest of a push, or when ctx ends.
func rest(ctx context.Context, took time.Duration) {
	timer := time.NewTimer(min(restFactor*took, maxRest))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// endTimeout bounds how long the client waits until the control plane has read its NACK.
const endTimeout = time.Second

// end ends the stream after the control plane has read all requests, or after endTimeout.
func (s *stream) end() {
	timer := time.AfterFunc(endTimeout, s.cancel)
	defer timer.Stop()
	for err := s.rpc.closeSend(); err == nil; {
		_, err = s.rpc.receive()
	}
}

// handle applies a response and answers it. It returns an error if the answer could not
// be sent, or a differenceError if the stream has to end.
func (s *stream) handle(r response) error {
	changed, err := s.client.use(r, s.acceptedAt.IsZero())
	if err != nil {
		s.client.reject(r, err)
		sent := s.rpc.answer(answer{nonce: r.nonce, version: s.version, rejection: rejection(err)})
		if differs(err) {
			return err
		}
		return sent
	}
	if s.acceptedAt.IsZero() {
		s.acceptedAt = time.Now()
		s.client.streamAccepted()
	}
	s.version = r.version
	err = s.rpc.answer(answer{nonce: r.nonce, version: s.version})
	s.client.save(changed)
	return err
}

// use applies a response, and returns what has to be saved. first is true if no earlier response
// of the stream was accepted.
func (c *Client) use(r response, first bool) (saving, error) {
	value, there, err := tableOf(r)
	if err != nil {
		return saving{}, err
	}
	isChange, err := hasChange(value)
	if err != nil {
		return saving{}, fmt.Errorf("a table of %d bytes: %w", len(value), err)
	}
	next := c.table
	switch {
	case isChange:
		next, err = c.changed(value, first)
	case there, r.whole, slices.Contains(r.removed, ""), next == nil, first && next.mode == ModeWhole:
		next, err = wholeTable(value)
	}
	if err != nil {
		return saving{}, err
	}
	shards, result := next.since(c.table), resultUnchanged
	if len(shards) > 0 {
		result = resultApplied
		start := time.Now()
		err := c.apply(shards)
		c.metrics.duration.Observe(time.Since(start).Seconds())
		if err != nil {
			return saving{}, err
		}
		if next.len() == 0 && c.table != nil && c.table.len() > 0 {
			c.log.Warn("the control plane sent no mesh hosts, the table is empty now", "version", r.version)
		}
	}
	save := saving{all: len(shards) > 0}
	if node := fingerprint(c.sentNode); isChange {
		save.all = c.table == nil || c.table.mode != ModeHosts || node != c.tableNode
		if !save.all && (len(shards) > 0 || !bytes.Equal(c.table.revision, next.revision)) {
			save.change = value
		}
		c.tableNode = node
	}
	c.table = next
	c.pushed(r, result)
	return save, nil
}

// changed returns the table after a change, a NameTable in wire form. If that does not have its checksum, the next
// stream asks for what is missing, and for everything after the first change of a stream: what differs then has the
// same digests.
func (c *Client) changed(value []byte, first bool) (*hostTable, error) {
	parsed, err := parseChange(value)
	if err != nil {
		return nil, err
	}
	next, err := c.table.with(&parsed)
	if c.undetected = err != nil && first; err == nil {
		return next, nil
	}
	if c.table != nil && c.table.mode == ModeHosts {
		c.table = c.table.summed()
	}
	c.setDifference(err.Error(), c.inUseTable().digest)
	return nil, err
}

// pushed counts and logs a response that was accepted. Its table is in use.
func (c *Client) pushed(r response, result string) {
	c.metrics.pushed(result, r.bytes)
	t := c.inUseTable()
	t.version, t.pushed = r.version, time.Now()
	first := c.setTable(t)
	log := c.log.Debug
	if first {
		log = c.log.Info
	}
	log("table pushed", "version", r.version, "result", result, "mode", t.mode, "hosts", c.table.len(), "bytes", r.bytes)
}

// reject counts and logs a response that is not used.
func (c *Client) reject(r response, reason error) {
	c.metrics.pushed(resultRejected, r.bytes)
	c.setRejected(reason)
	c.log.Warn("push rejected, the current table stays", "version", r.version, "nonce", r.nonce, "error", reason)
}

// rejection returns the error detail of a NACK. It replaces bytes that a protobuf string
// cannot hold, because the reason may quote any bytes.
func rejection(reason error) *rpcstatus.Status {
	text := reason.Error()
	if len(text) > maxReason {
		text = text[:maxReason] + " …"
	}
	return &rpcstatus.Status{
		Code:    int32(codes.InvalidArgument),
		Message: strings.ToValidUTF8(text, "\uFFFD"),
	}
}

// explainEnd adds to the reason why a stream ended what to do about it.
func explainEnd(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the control plane ended the stream")
	case status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"):
		// istiod answers too many new streams with the same code.
		return fmt.Errorf("push longer than 64 MiB, let the workload see fewer hosts (Sidecar, exportTo): %w", err)
	}
	return fmt.Errorf("receiving a push: %w", err)
}

// response is a response of either variant.
type response struct {
	typeURL, version, nonce string
	// bytes is the length in wire form.
	bytes int
	// whole is true if a response without a resource means an empty table; otherwise it means
	// no table.
	whole     bool
	resources []*discoveryv3.Resource
	removed   []string
}

// answer is an ACK or, if rejection is not nil, a NACK.
type answer struct {
	// nonce is the nonce of the response that is answered.
	nonce string
	// version is the version of the last accepted response. Only state-of-the-world
	// sends it.
	version   string
	rejection *rpcstatus.Status
}

// A variant is one of the two variants of ADS.
type variant int

const (
	// incremental sends only the resources that changed.
	incremental variant = iota
	// stateOfTheWorld sends all resources with each push.
	stateOfTheWorld
)

// String returns the variant's name in [Status].
func (v variant) String() string {
	if v == stateOfTheWorld {
		return "sotw"
	}
	return "incremental"
}

// rpc is the RPC of one of the two variants.
type rpc interface {
	// subscribe sends the first request, the only one with the node. It must be called
	// once: istiod answers a second one with everything, or not at all.
	subscribe(node *corev3.Node) error
	receive() (response, error)
	answer(a answer) error
	// closeSend ends the requests. The control plane then ends the stream.
	closeSend() error
}

// openRPC starts the RPC of a variant.
func openRPC(ctx context.Context, conn *grpc.ClientConn, v variant) (rpc, error) {
	ads := discoveryv3.NewAggregatedDiscoveryServiceClient(conn)
	if v == stateOfTheWorld {
		client, err := ads.StreamAggregatedResources(ctx)
		if err != nil {
			return nil, fmt.Errorf("opening the stream: %w", err)
		}
		return sotwRPC{client}, nil
	}
	client, err := ads.DeltaAggregatedResources(ctx)
	if err != nil {
		return nil, fmt.Errorf("opening the incremental stream: %w", err)
	}
	return incrementalRPC{client}, nil
}

type incrementalRPC struct {
	client discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
}

// subscribe names no resource, which subscribes to all.
func (r incrementalRPC) subscribe(node *corev3.Node) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

func (r incrementalRPC) receive() (response, error) {
	m, err := r.client.Recv()
	if err != nil {
		return response{}, err
	}
	return response{
		typeURL:   m.GetTypeUrl(),
		version:   m.GetSystemVersionInfo(),
		nonce:     m.GetNonce(),
		bytes:     proto.Size(m),
		resources: m.GetResources(),
		removed:   m.GetRemovedResources(),
	}, nil
}

func (r incrementalRPC) answer(a answer) error {
	return r.client.Send(&discoveryv3.DeltaDiscoveryRequest{
		TypeUrl: TypeURL, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}

func (r incrementalRPC) closeSend() error { return r.client.CloseSend() }

type sotwRPC struct {
	client discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient
}

func (r sotwRPC) subscribe(node *corev3.Node) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{Node: node, TypeUrl: TypeURL})
}

// receive converts the resources to the incremental form. A NameTable does not contain
// its name, so a resource has a name only if it is sent in xDS's wrapper, a
// discovery.v3.Resource.
func (r sotwRPC) receive() (response, error) {
	m, err := r.client.Recv()
	if err != nil {
		return response{}, err
	}
	converted := response{
		typeURL:   m.GetTypeUrl(),
		version:   m.GetVersionInfo(),
		nonce:     m.GetNonce(),
		bytes:     proto.Size(m),
		whole:     true,
		resources: make([]*discoveryv3.Resource, len(m.GetResources())),
	}
	for i, body := range m.GetResources() {
		wrapped := &discoveryv3.Resource{}
		if !body.MessageIs(wrapped) || body.UnmarshalTo(wrapped) != nil {
			// A malformed wrapper stays wrapped, and tableOf refuses its type.
			wrapped = &discoveryv3.Resource{Resource: body}
		}
		converted.resources[i] = wrapped
	}
	return converted, nil
}

func (r sotwRPC) answer(a answer) error {
	return r.client.Send(&discoveryv3.DiscoveryRequest{
		TypeUrl: TypeURL, VersionInfo: a.version, ResponseNonce: a.nonce, ErrorDetail: a.rejection,
	})
}

func (r sotwRPC) closeSend() error { return r.client.CloseSend() }
