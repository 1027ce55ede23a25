package nds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/clock"
)

// A stream is one ADS stream and its protocol state, which the goroutine of Client.Run
// owns. Every stream starts with the zero values.
type stream struct {
	receiver *receiver
	rpc      rpc
	accepted func() // called after the first accepted response

	// version is the version of the last accepted response. A rejected response does not change
	// version, so a NACK carries the previous version.
	version string
	// answered is true after the first response.
	answered bool
	// acceptedAt is when the first response was accepted; zero before that.
	acceptedAt time.Time
}

// run subscribes, then handles responses until the stream or ctx ends. It returns why the stream
// ended.
func (s *stream) run(ctx context.Context, node *corev3.Node) error {
	s.receiver.announced = s.receiver.table.versions() // the control plane then sends only the resources that differ
	err := s.rpc.subscribe(node, s.receiver.announced)
	for err == nil || errors.Is(err, io.EOF) {
		if ctx.Err() != nil { // gRPC would still return the responses that have arrived
			return context.Cause(ctx)
		}
		// A send returns EOF when the stream has ended; receive returns the reason.
		var r response
		if r, err = s.rpc.receive(); err != nil {
			return explainEnd(err)
		}
		s.receiver.state.update(func(status *Status) { status.Connected, status.Nonce = true, clip.Text(r.nonce, maxVersion) })
		if err = s.handle(ctx, r); errors.Is(err, errHash) {
			return err
		}
	}
	return fmt.Errorf("sending a request: %w", err)
}

// After a push, the client waits restFactor times as long as the push took, but at most maxRest. So pushes of up to
// 55 ms use at most a tenth of a processor. Without the wait, the author of an object with hosts in all shards could
// change the object again and again, and make agents build their whole table each time. The client answers the push
// only after the wait. Until then nametap-discovery sends no further push. After that it sends all changes in one
// push. With a longer maxRest, agents would not see a change of another object within a second. After a rejected push
// the client waits maxRest, because go-control-plane's server sends it again at once.
const (
	restFactor = 9
	maxRest    = 500 * time.Millisecond
)

// handle applies a response, waits and answers it. It returns an error if the answer could not be sent, and errHash if
// the stream must end.
func (s *stream) handle(ctx context.Context, r response) error {
	began := time.Now()
	r.first, s.answered = !s.answered, true
	changed, err := s.receiver.use(r)
	s.receiver.cfg.Handled()
	if err != nil {
		return s.reject(ctx, r, shorten(err))
	}
	if s.acceptedAt.IsZero() {
		s.acceptedAt = time.Now()
		s.accepted()
	}
	s.version = r.version
	s.receiver.save(changed)
	clock.Sleep(ctx, min(restFactor*time.Since(began), maxRest))
	return s.rpc.answer(r.nonce, s.version, nil)
}

// reject answers a response with a NACK. If a resource does not have the hash in its version, reject returns the reason,
// after the time that the control plane needs to read the NACK. The reason may quote any bytes, so reject replaces the
// bytes that a protobuf string cannot hold.
func (s *stream) reject(ctx context.Context, r response, reason error) error {
	s.receiver.reject(r, reason)
	nack := &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: strings.ToValidUTF8(reason.Error(), "\uFFFD")}
	clock.Sleep(ctx, maxRest)
	err := s.rpc.answer(r.nonce, s.version, nack)
	if errors.Is(reason, errHash) {
		clock.Sleep(ctx, maxRest)
		return reason
	}
	return err
}

const (
	// maxReason bounds an error that may quote a control plane, in the log, the status and a NACK.
	maxReason = 4 << 10
	// maxVersion bounds versions and nonces in the log and the status. Answers have them complete.
	maxVersion = 256
)

// A shortened error has a text of at most about maxReason bytes.
type shortened struct{ error }

func (s shortened) Error() string { return clip.Text(s.error.Error(), maxReason) }
func (s shortened) Unwrap() error { return s.error }

// shorten returns err with a bounded text.
func shorten(err error) error { return shortened{err} }

// explainEnd returns an error that describes err, the reason why a stream ended. For known reasons it adds advice.
func explainEnd(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the control plane ended the stream")
	case status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max"):
		// istiod returns the same code if there are too many new streams.
		return fmt.Errorf("push longer than 64 MiB, let the workload see fewer hosts (Sidecar, exportTo): %w", err)
	}
	return fmt.Errorf("receiving a push: %w", shorten(err))
}
