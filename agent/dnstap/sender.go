package dnstap

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/logonce"
)

const (
	// writeTimeout is how long a write to the receiver may take.
	writeTimeout = time.Minute
	// dialTimeout is how long opening a connection may take, including the handshake.
	dialTimeout = 5 * time.Second
	// finishTimeout is how long the receiver may take to confirm the end.
	finishTimeout = time.Second
	// The pause before the next connection doubles from minPause to maxPause.
	minPause, maxPause = 250 * time.Millisecond, 30 * time.Second
	// steady is how long a connection must last before the next pause is minPause again. Without it, the sender
	// would never back off from a peer that ends each connection soon, such as a proxy without a receiver behind it.
	steady = time.Second
	// While more queries wait, frames are collected until they have fullBuffer bytes, and then sent.
	fullBuffer = 32 << 10
)

// errGone is the error of a connection that the receiver has closed.
var errGone = errors.New("the receiver has closed the connection")

// A Config configures a [Sender].
type Config struct {
	// Identity and Version are the name and the version of this server in the messages.
	Identity, Version string
	// Resolver finds the address of a TCP receiver. nil means the default.
	Resolver *net.Resolver
	// Logger is the log.
	Logger *slog.Logger
	// Registerer registers the metrics.
	Registerer prometheus.Registerer
}

// A Sender sends queries to a receiver. Make one with [New].
type Sender struct {
	config  Config
	dialer  net.Dialer
	metrics *metrics
}

// New returns a Sender.
func New(cfg Config) *Sender {
	return &Sender{config: cfg, dialer: net.Dialer{Resolver: cfg.Resolver}, metrics: newMetrics(cfg.Registerer)}
}

// Run sends queries to a receiver until ctx ends. The parameter to is the address of the receiver. Run calls the
// function read once, to get a reader of the queries. When the reader drops messages, it calls the function lost with
// their number. Run must not be called again before it has returned.
func (s *Sender) Run(ctx context.Context, to Target, read func(lost func(messages int)) *seen.Reader) {
	reader := read(func(messages int) { s.metrics.dropped.Add(float64(messages)) })
	defer reader.Close()
	log := s.config.Logger.With("receiver", to)
	failures := 0
	var failure logonce.Failure
	for ctx.Err() == nil {
		began := time.Now()
		err := s.connection(ctx, to, reader, func() {
			s.metrics.connected.Set(1)
			log.Info("dnstap: the receiver accepts messages")
		})
		s.metrics.connected.Set(0)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) >= steady {
			failures = 0
			failure.Forget()
		}
		if failure.Differs(err) {
			log.Warn("dnstap: no receiver takes messages: they are dropped until a receiver does; retrying", "error", err)
		}
		if !clock.Sleep(ctx, clock.Jitter(clock.BackOff(failures, minPause, maxPause))) {
			return
		}
		failures++
	}
}

// connection sends queries over one connection. It calls the function ready after the handshake. It returns when ctx
// has ended, or when the connection has failed.
func (s *Sender) connection(ctx context.Context, to Target, reader *seen.Reader, ready func()) error {
	conn, err := s.dial(ctx, to)
	if err != nil {
		return err
	}
	defer conn.Close()
	ready()
	serving, gone := context.WithCancelCause(ctx)
	defer gone(nil)
	finished := make(chan struct{})
	go func() { // after the handshake, the receiver sends only FINISH
		defer close(finished)
		if err := expect(conn, controlFinish); err != nil && !errors.Is(err, io.EOF) {
			gone(fmt.Errorf("%w: %w", errGone, err))
		}
		gone(errGone)
	}()
	defer func() {
		_ = conn.Close()
		<-finished
	}()
	out := stream{
		encoder: encoder{identity: s.config.Identity, version: s.config.Version},
		conn:    conn, metrics: s.metrics, timeout: writeTimeout,
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetWriteDeadline(time.Now().Add(finishTimeout)) })
	defer stop()
	if err := out.sendUntil(serving, reader); err != nil {
		return err
	}
	if ctx.Err() == nil {
		return context.Cause(serving)
	}
	out.timeout = finishTimeout
	if out.end(ctx, reader) == nil {
		select {
		case <-finished:
		case <-time.After(finishTimeout):
		}
	}
	return nil
}

// dial connects to the receiver and makes the handshake: READY, ACCEPT, START.
func (s *Sender) dial(ctx context.Context, to Target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := s.dialer.DialContext(ctx, to.network, to.address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = conn.Write(control(controlReady))
	if err == nil {
		err = expect(conn, controlAccept)
	}
	if err == nil {
		_, err = conn.Write(control(controlStart))
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("handshake with the receiver: %w", err)
	}
	return conn, nil
}

// A stream sends frames over a connection.
type stream struct {
	encoder

	conn    net.Conn
	metrics *metrics
	timeout time.Duration // how long a write may take
	frames  []byte        // frames that have not been sent yet
	count   int           // number of these frames
}

// sendUntil sends queries until ctx ends. If the connection fails, it returns the error.
func (o *stream) sendUntil(ctx context.Context, reader *seen.Reader) error {
	for ctx.Err() == nil {
		records, _, _ := reader.Next(ctx) // an error is the end of ctx
		if err := o.send(records); err != nil {
			return err
		}
	}
	return nil
}

// end sends the queries that wait when ctx has ended, and then STOP.
func (o *stream) end(ended context.Context, reader *seen.Reader) error {
	records, _, _ := reader.Next(ended) // an error if there are none
	if err := o.send(records); err != nil {
		return err
	}
	_, err := o.conn.Write(control(controlStop))
	return err
}

// send sends the frames of queries, up to fullBuffer bytes and one query at a time. If it fails, the rest is dropped.
func (o *stream) send(records []seen.Record) (err error) {
	for i := range records {
		if err != nil {
			o.metrics.dropped.Add(float64(records[i].Messages()))
			continue
		}
		o.frames = o.append(o.frames, &records[i])
		o.count += records[i].Messages()
		if len(o.frames) >= fullBuffer {
			err = o.flush()
		}
	}
	if err != nil {
		return err
	}
	return o.flush()
}

// flush sends the frames.
func (o *stream) flush() error {
	if o.count == 0 {
		return nil
	}
	err := o.conn.SetWriteDeadline(time.Now().Add(o.timeout))
	if err == nil {
		_, err = o.conn.Write(o.frames)
	}
	if err != nil {
		o.metrics.dropped.Add(float64(o.count))
	} else {
		o.metrics.frames.Add(float64(o.count))
	}
	o.frames, o.count = o.frames[:0], 0
	return err
}

// contentType is the type of the frames' content: messages of dnstap.proto.
const contentType = "protobuf:dnstap.Dnstap"

// The kinds of control frames of Frame Streams.
const (
	controlAccept = 1
	controlStart  = 2
	controlStop   = 3
	controlReady  = 4
	controlFinish = 5
)

const (
	fieldContentType = 1
	maxControl       = 512 // bytes of a control frame
)

// control returns a control frame of a kind. Frames of the kinds READY and START name the content type.
func control(kind uint32) []byte {
	order := binary.BigEndian
	body := order.AppendUint32(nil, kind)
	if kind == controlReady || kind == controlStart {
		body = order.AppendUint32(body, fieldContentType)
		body = order.AppendUint32(body, uint32(len(contentType)))
		body = append(body, contentType...)
	}
	frame := order.AppendUint32(nil, 0) // the escape: a length of 0 begins a control frame
	frame = order.AppendUint32(frame, uint32(len(body)))
	return append(frame, body...)
}

// errNoControl is the error of a receiver of another protocol.
var errNoControl = errors.New("the receiver does not speak Frame Streams")

// expect reads a control frame, and returns an error unless it is of the given kind. Its fields do not count: a receiver of
// another content than dnstap ends the connection.
func expect(r io.Reader, kind uint32) error {
	var head [12]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	order := binary.BigEndian
	length, got := order.Uint32(head[4:]), order.Uint32(head[8:])
	switch {
	case order.Uint32(head[:]) != 0 || length < 4 || length > maxControl:
		return errNoControl
	case got != kind:
		return fmt.Errorf("%w: its control frame has the type %d, not %d", errNoControl, got, kind)
	}
	_, err := io.CopyN(io.Discard, r, int64(length-4))
	return err
}

// A Target is where the receiver listens. The zero Target means no receiver.
type Target struct {
	network string // unix or tcp
	address string
}

// errTarget is the error for a text that is not a target.
var errTarget = errors.New("want unix:///PATH or tcp://HOST:PORT")

// maxPath is the longest path of a unix socket.
const maxPath = 107

// String returns the text that UnmarshalText reads.
func (t Target) String() string {
	if t == (Target{}) {
		return ""
	}
	return t.network + "://" + t.address
}

// MarshalText returns the text that UnmarshalText reads.
func (t Target) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText reads unix:///PATH or tcp://HOST:PORT. An empty text means no receiver.
func (t *Target) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*t = Target{}
		return nil
	}
	network, address, _ := strings.Cut(string(text), "://")
	switch network {
	case "unix":
		if !strings.HasPrefix(address, "/") || len(address) < 2 || len(address) > maxPath || strings.Contains(address, "\x00") {
			return errTarget
		}
	case "tcp":
		host, port, err := net.SplitHostPort(address)
		number, numberErr := strconv.ParseUint(port, 10, 16)
		if err != nil || numberErr != nil || host == "" || number == 0 {
			return errTarget
		}
	default:
		return errTarget
	}
	*t = Target{network, address}
	return nil
}

// metrics are the metrics of a Sender; docs/metrics.md describes them for operators.
type metrics struct {
	frames    prometheus.Counter
	dropped   prometheus.Counter
	connected prometheus.Gauge
}

// newMetrics returns registered metrics.
func newMetrics(registry prometheus.Registerer) *metrics {
	auto := promauto.With(registry)
	return &metrics{
		frames: auto.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_frames_total", Help: "Messages sent to the receiver of dnstap.",
		}),
		dropped: auto.NewCounter(prometheus.CounterOpts{
			Name: "nametap_dnstap_dropped_total", Help: "Messages for the receiver of dnstap that were dropped, since it was away or slow.",
		}),
		connected: auto.NewGauge(prometheus.GaugeOpts{
			Name: "nametap_dnstap_connected", Help: "1 while the receiver of dnstap accepts messages.",
		}),
	}
}
