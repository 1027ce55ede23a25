package nds

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	// A stream counts as a failure unless it lasts for the time stableAfter after its first accepted push.
	// Otherwise the client would connect several times a second to a control plane that pushes and then closes
	// the stream.
	stableAfter = 10 * time.Second

	// A control plane may be slow to make the first table, or busy, so a stream without an answer stays open. After
	// answerAfter, log and status say that there is none.
	answerAfter = 30 * time.Second
)

var (
	// errNotOpened ends an attempt whose stream does not open within openTimeout.
	errNotOpened = fmt.Errorf("the server accepted the connection, but no stream within %v: look at its log, and at proxies before it", openTimeout)
	// errSilent is in Status while a stream has no answer.
	errSilent = fmt.Errorf("the control plane has accepted a stream, and sent no table for %v: look at its log; the stream stays open", answerAfter)
)

// Client keeps a stream to a control plane open. Make one with [New].
type Client struct {
	cfg      Config
	renewer  *certRenewer
	saver    *snapshotSaver
	state    state
	restored chan struct{} // closed by Run after it has tried to use the snapshot

	// The fields below are owned by the goroutine of Run.

	// sentNode is the node of the last connect. It is nil before the first connect, and if the node could not be
	// determined.
	sentNode *corev3.Node
	// pingAfter is how long a connection is silent before the client pings. It doubles
	// when the control plane answers "too_many_pings".
	pingAfter time.Duration
	// failed is the workload certificate with which the last connect failed; nil if it failed without. It stays
	// while streams use the token in its place.
	failed *tls.Certificate
	// failures counts the pauses between connects. It starts again at 0 after a stream that has lasted for
	// stableAfter, and after a suspend of the machine.
	failures       int
	streamFailures logonce.Log // logs why there is no stream
	receiver       receiver

	// slept is the value of cfg.Clock.Slept when Run last noticed that the machine was suspended.
	slept time.Duration
}

// New returns a client that has not connected yet. It returns an error if a setting is invalid.
func New(cfg Config, apply ApplyFunc) (*Client, error) {
	if apply == nil {
		return nil, errors.New("no apply function given")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	dir := statedir.New(cfg.StateDir, lockName)
	c := &Client{
		cfg:            cfg,
		restored:       make(chan struct{}),
		state:          state{clock: cfg.Clock, ready: make(chan struct{}), failures: map[condition.Code]failure{}, status: Status{Address: cfg.Addr, Variant: incremental.String()}},
		pingAfter:      pingAfter,
		streamFailures: logonce.New(cfg.Logger),
	}
	c.renewer, c.saver = newCertRenewer(cfg, dir, &c.state), newSnapshotSaver(dir, cfg.Logger, &c.state)
	c.receiver = receiver{
		cfg: cfg, apply: apply, table: newTable(), metrics: newMetrics(cfg.Registerer, &c.state, c.certificateExpires),
		state: &c.state, saver: c.saver, dir: dir,
		rejections: logonce.New(cfg.Logger),
	}
	return c, nil
}

// Ready returns a channel that is closed when the first table, pushed or from the
// snapshot, is in use.
func (c *Client) Ready() <-chan struct{} { return c.state.ready }

// Restored returns a channel that is closed when the snapshot is in use, or could not be
// used.
func (c *Client) Restored() <-chan struct{} { return c.restored }

// Status returns the current state of the client. It is safe for concurrent use.
func (c *Client) Status() Status {
	s := c.state.readDigest()
	s.CertificateExpires = c.certificateExpires()
	return s
}

// certificateExpires returns when the certificate of the next connection expires: the client certificate in its file, or
// the workload certificate. It returns zero if there is none.
func (c *Client) certificateExpires() time.Time {
	certificate := c.renewer.valid()
	switch {
	case c.cfg.Plaintext:
		return time.Time{}
	case c.cfg.CertFile != "":
		// After an error, which the next connect reports, the pair is empty.
		pair, _ := tls.LoadX509KeyPair(c.cfg.CertFile, c.cfg.KeyFile)
		certificate = &pair
	}
	if certificate == nil || certificate.Leaf == nil {
		return time.Time{}
	}
	return certificate.Leaf.NotAfter
}

// Run uses the snapshot, if there is one. Then it keeps a stream to the control plane open until ctx ends, and
// returns nil. When Run returns, all its goroutines have ended. Run must be called only once.
func (c *Client) Run(ctx context.Context) error {
	c.receiver.restore()
	close(c.restored)
	c.renewer.load()
	ctx, stop := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer stop()
	defer c.streamFailures.Reset()
	tasks.Go(func() { c.renewer.run(ctx) })
	// The saver outlives ctx, because the last push may not have been passed to the saver yet.
	stopSaving := c.saver.start()
	defer stopSaving()
	for ctx.Err() == nil {
		lasted, err := c.connect(ctx)
		c.cfg.Handled()
		failed := classify(c.cfg, c.cfg.Addr, "--xds-addr", err)
		err = failed.advise(err)
		c.state.update(func(s *Status) { s.Connected, s.Open, s.LastError = false, false, err.Error() })
		if errors.Is(err, errResumed) {
			c.resumed()
		} else if !errors.Is(err, errNodeChanged) {
			c.state.failed(failed)
		}
		if lasted >= stableAfter {
			c.failures = 0
			c.streamFailures.Reset()
		}
		wait := pause(c.failures, rand.Float64())
		c.logEnd(ctx, err, lasted > 0 && c.failures == 0, wait)
		c.failures++
		c.wait(ctx, wait)
	}
	return nil
}

// currentNode returns the node as it is now.
func (c *Client) currentNode() (*corev3.Node, error) {
	node := c.cfg.Node
	if c.cfg.Refresh != nil {
		var err error
		node, err = c.cfg.Refresh(c.cfg.Node)
		if err == nil {
			node, err = node.withDefaults()
		}
		if err != nil {
			return nil, fileError{"the addresses and labels of this node", err}
		}
	}
	return node.proto()
}

// awaitChange waits for a change. It returns errNodeChanged when the node differs from previous, errResumed when the
// machine was suspended, and nil if ctx ends first.
func (c *Client) awaitChange(ctx context.Context, previous *corev3.Node) error {
	resumed, stopResumed := c.cfg.Clock.Poll(clock.Tick, func() bool { return c.cfg.Clock.Slept()-c.slept >= briefSleep })
	defer stopResumed()
	recheck, stopRecheck := c.cfg.Clock.Poll(nodeInterval, func() bool { return true })
	defer stopRecheck()
	var settled <-chan time.Time // when to check the node after the first signal on Changed; nil without a signal
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-resumed:
			return errResumed
		case <-c.cfg.Changed:
			if settled == nil {
				settled = time.After(nodeSettle)
			}
			continue
		case <-settled:
			settled = nil
		case <-recheck:
		}
		// An error is ignored, because an open stream is better than none: the next connect reports the error.
		if node, err := c.currentNode(); err == nil && !proto.Equal(node, previous) {
			return errNodeChanged
		}
	}
}

var (
	// errNodeChanged ends a stream after the node has changed.
	errNodeChanged = errors.New("the addresses or labels of this node have changed")
	// errResumed ends a stream after the machine was suspended. The peer, or a NAT on the way, has usually
	// forgotten the connection. Pings would notice that up to 30 s later, because timers stand still during a
	// suspend.
	errResumed = errors.New("this machine was suspended")
)

const (
	// nodeInterval is how often the node is checked without a signal on Config.Changed.
	nodeInterval = 12 * clock.Tick
	// nodeSettle is the time from a signal to the check of the node: the addresses of several families and
	// interfaces change one after the other.
	nodeSettle = time.Second

	// briefSleep is the length of the shortest suspend after which the client connects again.
	briefSleep = 10 * time.Second
)

// resumed is called after the machine was suspended. It resets the back-off, and makes the renewer check the workload
// certificate, which may have expired during the suspend.
func (c *Client) resumed() {
	c.slept, c.failures = c.cfg.Clock.Slept(), 0
	c.renewer.check()
}

// wait returns after the pause. It returns earlier if ctx ends, if the machine resumes from a suspend, or if the
// node changes, because a new address may mean that the control plane can be reached again.
func (c *Client) wait(ctx context.Context, pause time.Duration) {
	paused, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	if errors.Is(c.awaitChange(paused, c.sentNode), errResumed) {
		c.resumed()
	}
	if ctx.Err() == nil {
		c.state.update(func(s *Status) { s.Reconnects++ })
	}
}

// connect opens a connection and a stream, and returns when they end, when the node changes or when the machine
// resumes from a suspend. lasted is how long the stream lasted after its first accepted push, or 0 if no push was
// accepted. err says why the stream ended.
func (c *Client) connect(ctx context.Context) (lasted time.Duration, err error) {
	c.sentNode, err = c.currentNode()
	if err != nil {
		return 0, err
	}
	creds, err := readCredentials(c.cfg, c.renewer.certificateAfter(c.failed), c.cfg.ServerName)
	if err != nil {
		return 0, err
	}
	if creds.workload != nil {
		c.failed = nil
	}
	var watch sync.WaitGroup
	defer watch.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch.Go(func() { cancel(c.awaitChange(ctx, c.sentNode)) })
	lasted, err = c.runStreams(ctx, cancel, creds)
	if err != nil && strings.Contains(err.Error(), "too_many_pings") {
		c.pingAfter = min(2*c.pingAfter, maxPingAfter) // TCP keep-alives still notice a dead host
		c.cfg.Logger.Warn("the control plane, or a proxy in front of it, permits fewer pings: a hung control plane is detected later",
			"reason", "too many pings", "every", c.pingAfter)
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errNodeChanged), errors.Is(cause, errResumed):
		return lasted, cause
	case lasted == 0 && creds.outdated != nil:
		return 0, creds.outdated
	case errors.Is(cause, errNotOpened):
		return 0, cause
	}
	return lasted, err
}

// runStreams opens a connection and a stream of the incremental variant. If the control plane does not implement that
// variant, runStreams opens a stream of state-of-the-world. It returns when the stream ends, with the results of
// connect.
func (c *Client) runStreams(ctx context.Context, cancel context.CancelCauseFunc, creds connectionCredentials) (lasted time.Duration, err error) {
	pings := grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: c.pingAfter, Timeout: pingTimeout})
	conn, err := dial(ctx, c.cfg, c.cfg.Addr, append(creds.options, pings)...)
	if err != nil {
		return 0, err
	}
	defer conn.close()
	for _, v := range []variant{incremental, stateOfTheWorld} {
		lasted, err = c.runStream(ctx, cancel, conn.ClientConn, v)
		if lasted > 0 {
			return lasted, err
		}
		if status.Code(err) != codes.Unimplemented {
			break
		}
	}
	c.failed = creds.workload
	return 0, conn.explain(err)
}

// runStream opens a stream, and returns when the stream ends. Its results mean the same as the results of connect.
func (c *Client) runStream(ctx context.Context, cancel context.CancelCauseFunc, conn *grpc.ClientConn, v variant) (lasted time.Duration, err error) {
	opening := time.AfterFunc(openTimeout, func() { cancel(errNotOpened) })
	rpc, err := openRPC(ctx, conn, v)
	opening.Stop()
	if err != nil {
		return 0, err
	}
	c.state.update(func(s *Status) { s.Open = true })
	waiting := time.AfterFunc(answerAfter, c.reportSilence)
	defer waiting.Stop()
	s := &stream{receiver: &c.receiver, rpc: rpc, accepted: func() { c.streamAccepted(v) }}
	err = s.run(ctx, c.sentNode)
	if !s.acceptedAt.IsZero() {
		lasted = max(1, time.Since(s.acceptedAt)) // above 0, even if the clock is coarse
	}
	return lasted, err
}

// streamAccepted is called after the first accepted response of a stream.
func (c *Client) streamAccepted(v variant) {
	previous := v.String()
	c.state.update(func(s *Status) { previous, s.Variant = s.Variant, previous })
	if v == stateOfTheWorld && previous != v.String() {
		c.cfg.Logger.Warn("the control plane has no incremental ADS, using state-of-the-world", "address", c.cfg.Addr)
	}
	if c.failed != nil { // the token was accepted in its place
		c.renewer.replace(c.failed)
	}
	c.streamFailures.Recover("the stream to the control plane is back", "address", c.cfg.Addr)
}

// reportSilence is called if a stream has been open for answerAfter. It does nothing if there was an answer.
func (c *Client) reportSilence() {
	silent := false
	c.state.update(func(s *Status) {
		if silent = s.Open && !s.Connected; silent {
			s.LastError = errSilent.Error()
		}
	})
	if silent {
		c.cfg.Logger.Warn("no table from the control plane so far", "address", c.cfg.Addr, "error", errSilent)
	}
}

// logEnd logs that there is no stream, and err as the reason. It logs nothing if Run is about to return. expected
// is true if the stream worked until its end: istiod ends every stream after 30 minutes, and that needs no warning.
// wait is the pause before the next connect.
func (c *Client) logEnd(ctx context.Context, err error, expected bool, wait time.Duration) {
	if ctx.Err() != nil {
		return
	}
	if errors.Is(err, errNodeChanged) || errors.Is(err, errResumed) {
		c.cfg.Logger.Info("connecting again: "+err.Error(), "address", c.cfg.Addr)
		return
	}
	level := slog.LevelWarn
	if expected {
		level = slog.LevelInfo
	}
	c.streamFailures.Report("no stream to the control plane", level, err, "address", c.cfg.Addr, "retry_in", wait)
}
