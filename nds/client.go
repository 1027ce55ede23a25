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
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/statedir"
)

const (
	// The ceiling of the pause before the next connect starts at minPause and
	// doubles up to maxPause.
	minPause = 100 * time.Millisecond
	maxPause = 30 * time.Second

	// A stream that ends sooner than this after its first accepted push counts as a
	// failure, or a control plane that pushes and then closes would be connected to
	// several times a second.
	steadyAfter = 10 * time.Second

	// A control plane without the incremental RPC may be upgraded, so the first connect
	// after this time tries it again.
	incrementalAgain = time.Hour
)

// ApplyFunc puts a complete set of resources, sorted by name, to use. An error
// rejects the push: the control plane is told the reason and the set before
// stays. It is called from one goroutine, never concurrently. It must not keep
// or change the slice; it may keep the Values, which nobody changes.
type ApplyFunc func(resources []Resource) error

// Client holds a stream to a control plane. Make one with [New].
type Client struct {
	cfg     Config
	apply   ApplyFunc
	log     *slog.Logger
	metrics *metrics
	ready   chan struct{} // closed by setTable

	restored chan struct{} // closed when the snapshot is in use, or there is none

	workload *workload
	dir      *statedir.Dir

	// The fields below belong to the goroutine of Run.

	// told is the node of the last connect; nil if there was none, or if the node
	// could not be found out.
	told *corev3.Node
	// pingAfter is how long a connection is silent before it is asked for a sign of
	// life. It doubles when the control plane finds that too often.
	pingAfter time.Duration
	// passedOver is the workload certificate in whose place the last connect used the
	// token, since it had failed several times; nil if there is none.
	passedOver *tls.Certificate
	// failures counts the connects since a stream last stood for steadyAfter.
	failures int
	// lost logs why there is no stream, unkept why there is no snapshot.
	lost, unkept repeated
	// variant is the one to connect with. It is StateOfTheWorld from fellBack, when the
	// control plane turned out not to have the incremental RPC, for incrementalAgain.
	// fallbacks counts how often that was so.
	variant   Variant
	fellBack  time.Time
	fallbacks int
	// inUse is the set that apply accepted last, of whatever stream or of the
	// snapshot; loaded says that there was one. Neither is ever reset.
	inUse  []Resource
	loaded bool
	// unsaved says that inUse is not what the snapshot holds.
	unsaved bool

	// state is what Status and the metrics read.
	mu    sync.Mutex
	state Status
}

// New returns a client that has not yet connected. It fails if a setting cannot
// be right, or if the metrics are registered already.
func New(cfg Config, apply ApplyFunc) (*Client, error) {
	if apply == nil {
		return nil, errors.New("no apply function given")
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if _, err := cfg.Node.proto(); err != nil {
		return nil, err
	}
	dir := statedir.New(cfg.StateDir, lockName)
	c := &Client{
		cfg:       cfg,
		apply:     apply,
		log:       cfg.Logger,
		ready:     make(chan struct{}),
		restored:  make(chan struct{}),
		dir:       dir,
		workload:  newWorkload(cfg, dir),
		unkept:    repeated{log: cfg.Logger},
		pingAfter: pingAfter,
		lost:      repeated{log: cfg.Logger},
		variant:   cfg.Variant,
		state:     Status{Address: cfg.Addr, Variant: cfg.Variant.String()},
	}
	c.metrics = newMetrics(c.Status)
	if cfg.Registerer != nil {
		if err := cfg.Registerer.Register(c.metrics); err != nil {
			return nil, fmt.Errorf("registering the metrics of the control plane client: %w", err)
		}
	}
	return c, nil
}

// Ready returns a channel that is closed once a first table, pushed or from the
// snapshot, is in use.
func (c *Client) Ready() <-chan struct{} { return c.ready }

// Restored returns a channel that is closed once the snapshot is in use, or there is none
// that can be used.
func (c *Client) Restored() <-chan struct{} { return c.restored }

// Run uses the snapshot, if there is one, then keeps a stream to the control
// plane until ctx ends, and returns nil. Nothing it started goes on after that.
// It must be called only once.
func (c *Client) Run(ctx context.Context) error {
	defer c.dir.Unlock()
	c.restore()
	close(c.restored)
	c.workload.load()
	ctx, stop := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer stop()
	defer c.lost.over()
	tasks.Go(func() { c.workload.run(ctx) })
	for ctx.Err() == nil {
		stood, err := c.connect(ctx)
		err = advise(c.cfg, c.cfg.Addr, "--xds-addr", err)
		c.setDisconnected(err)
		if stood >= steadyAfter {
			c.failures = 0
			c.lost.over()
		}
		if c.fallBack(err) {
			continue
		}
		wait := pause(c.failures, rand.Float64())
		c.logLost(ctx, loss{err: err, expected: stood > 0 && c.failures == 0, wait: wait})
		c.failures++
		c.wait(ctx, wait)
	}
	return nil
}

// wait returns after the pause, or earlier if ctx ends or the node changes: an
// interface that comes up is a reason to try again.
func (c *Client) wait(ctx context.Context, pause time.Duration) {
	paused, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	c.awaitChange(paused, c.told)
	if ctx.Err() == nil {
		c.countReconnect()
	}
}

// connect makes a connection and a stream and stays until they end, or until the
// node is no longer the one that the control plane was told. It reports for how long
// the stream stood after its first accepted push, 0 if there was none, and why it
// ended.
func (c *Client) connect(ctx context.Context) (stood time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c.retryIncremental()
	c.told, err = c.currentNode()
	if err != nil {
		return 0, err
	}
	proof, err := readCredentials(c.cfg, c.certificate(), c.cfg.ServerName)
	if err != nil {
		return 0, err
	}
	conn, err := dial(c.cfg, c.cfg.Addr, c.pingAfter, proof)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close() }()
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel(nil)
	watch.Go(func() {
		if c.awaitChange(ctx, c.told) {
			cancel(errNodeChanged)
		}
	})
	stood, err = c.stream(ctx, conn)
	if errors.Is(context.Cause(ctx), errNodeChanged) {
		err = errNodeChanged
	}
	if err != nil && strings.Contains(err.Error(), "too_many_pings") {
		c.pingLess()
	}
	switch {
	case proof.workload == nil:
	case stood > 0:
		c.workload.accepted(proof.workload)
	case certificateRefused(err):
		c.workload.refused(proof.workload)
	}
	return stood, err
}

// certificate returns the workload certificate to connect with; nil means none. When it
// has failed several times the token, if it is good, takes its place every second time:
// a server that refuses a certificate may end the connection before it says so.
func (c *Client) certificate() *tls.Certificate {
	const several = 3
	certificate := c.workload.proof()
	c.passedOver = nil
	if c.failures >= several && c.failures%2 == 1 && goodToken(c.cfg.TokenFile) {
		c.passedOver = certificate
		return nil
	}
	return certificate
}

// stream opens a stream and stays until it ends. It returns what connect does.
func (c *Client) stream(ctx context.Context, conn *grpc.ClientConn) (stood time.Duration, err error) {
	w, err := openWire(ctx, conn, c.variant)
	if err != nil {
		return 0, err
	}
	s := &stream{client: c, wire: w}
	err = s.run(c.told)
	if s.accepted {
		stood = max(1, time.Since(s.since)) // the clock may be coarse
	}
	return stood, err
}

// fallBack changes the variant if err says that the control plane does not know it, and
// reports whether the other one is worth a connect at once. Proxies say the same of a
// control plane that is away, so neither variant is given up for good.
func (c *Client) fallBack(err error) (atOnce bool) {
	if c.cfg.Variant != Incremental || status.Code(err) != codes.Unimplemented {
		return false
	}
	if c.variant == StateOfTheWorld {
		c.setVariant(Incremental)
		return false
	}
	c.fellBack = time.Now()
	c.setVariant(StateOfTheWorld)
	if c.fallbacks++; c.fallbacks == 1 {
		c.log.Warn("control plane has no incremental ADS, using state-of-the-world; --xds=sotw saves the attempt",
			"address", c.cfg.Addr, "error", err)
	}
	return true
}

// retryIncremental ends a fallback after a while.
func (c *Client) retryIncremental() {
	if c.variant != c.cfg.Variant && time.Since(c.fellBack) >= incrementalAgain {
		c.setVariant(c.cfg.Variant)
	}
}

// setVariant sets the variant of the next connect.
func (c *Client) setVariant(v Variant) {
	c.variant = v
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Variant = v.String()
}

// pause is the time to wait after so many failures in a row, with full jitter: a
// random part, from 0 to 1, of a ceiling that doubles.
func pause(failures int, part float64) time.Duration {
	ceiling := maxPause
	if failures < 16 { // 0.1 s doubled 16 times is past any ceiling
		ceiling = min(maxPause, minPause<<failures)
	}
	return time.Duration(part * float64(ceiling))
}

// loss is the end of a stream, or of the attempt to open one.
type loss struct {
	err error
	// expected says that the stream before it worked: istiod ends every stream after
	// 30 minutes, which is worth no warning.
	expected bool
	wait     time.Duration
}

// logLost says that the stream is gone, unless we ended it.
func (c *Client) logLost(ctx context.Context, l loss) {
	if ctx.Err() != nil {
		return
	}
	if errors.Is(l.err, errNodeChanged) {
		c.log.Info("connecting again, since "+l.err.Error(), "address", c.cfg.Addr)
		return
	}
	level := slog.LevelWarn
	if l.expected {
		level = slog.LevelInfo
	}
	c.lost.say("no stream to the control plane", level, l.err, "address", c.cfg.Addr, "retry_in", l.wait)
}
