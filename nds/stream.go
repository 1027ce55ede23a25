package nds

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxReason bounds the reason in a NACK: control planes log it.
const maxReason = 4 << 10

// stream is one ADS stream and what the protocol wants remembered of it. A new
// stream starts with the zero values.
type stream struct {
	client *Client
	wire   wire

	// set is what the control plane believes us to hold. An accepted response
	// changes it. If the first response is rejected it becomes the set in use.
	set []Resource
	// version is that of the last accepted response; a rejected one leaves it,
	// so that a NACK carries the previous version.
	version string
	// accepted says that a response was, and since is when the first was; neither is
	// ever reset.
	accepted bool
	since    time.Time
}

// run subscribes as node, handles responses until the stream ends, and says why it
// did.
func (s *stream) run(node *corev3.Node) error {
	err := s.wire.subscribe(node)
	for err == nil || errors.Is(err, io.EOF) {
		// After EOF from a send, only receive knows what happened.
		var r response
		if r, err = s.wire.receive(); err != nil {
			return explain(err)
		}
		s.client.setConnected(r.nonce)
		err = s.handle(r)
	}
	return fmt.Errorf("sending a request: %w", err)
}

// handle puts a response to use and answers it. The error is that of the answer.
func (s *stream) handle(r response) error {
	set, err := fold(s.set, r)
	if err == nil {
		err = s.client.use(set, r)
	}
	if err != nil {
		s.client.reject(r, err)
		if !s.accepted {
			s.set = s.client.inUse
		}
		return s.wire.answer(answer{nonce: r.nonce, version: s.version, rejection: rejection(err)})
	}
	if !s.accepted {
		s.accepted, s.since = true, time.Now()
		if s.client.passedOver != nil { // the token does where the certificate did not
			s.client.workload.refused(s.client.passedOver)
		}
		s.client.lost.recover("the stream to the control plane is back", "address", s.client.cfg.Addr)
	}
	s.set, s.version = set, r.version
	err = s.wire.answer(answer{nonce: r.nonce, version: s.version})
	s.client.save()
	return err
}

// use makes set the one in use, unless it is already.
func (c *Client) use(set []Resource, r response) error {
	result := resultUnchanged
	if !c.loaded || !sameContent(c.inUse, set) {
		result = resultApplied
		start := time.Now()
		err := c.apply(set)
		c.metrics.duration.Observe(time.Since(start).Seconds())
		if err != nil {
			return err
		}
		if isEmpty(set) && !isEmpty(c.inUse) {
			c.log.Warn("the control plane says that there are no mesh hosts, and the table is empty now", "version", r.version)
		}
		c.inUse, c.loaded, c.unsaved = set, true, true
	}
	c.metrics.pushed(result, r.bytes)
	first := c.setTable(table{version: r.version, pushed: time.Now(), resources: len(set)})
	log := c.log.Debug
	if first {
		log = c.log.Info
	}
	log("table pushed", "version", r.version, "result", result, "resources", len(set), "bytes", r.bytes)
	return nil
}

// reject counts a response that is not used, and says so.
func (c *Client) reject(r response, reason error) {
	c.metrics.pushed(resultRejected, r.bytes)
	c.setRejected(reason)
	c.log.Warn("push rejected, the table before it stays", "version", r.version, "nonce", r.nonce, "error", reason)
}

// rejection is the detail of a NACK. What cannot stand in a protobuf string is
// replaced: the reason may quote any bytes.
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

// explain says of the end of a stream what the user can do about it.
func explain(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the control plane ended the stream")
	case status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"):
		// The same code is istiod's answer to too many new streams.
		return fmt.Errorf("push too long, raise --max-push-bytes: %w", err)
	}
	return fmt.Errorf("receiving a push: %w", err)
}
