// Package stream is a client of one gRPC stream that has a TCP connection of its own. It has one goroutine
// and 4 KiB of buffer, and reads and writes once for each message: a process can play ten thousand clients
// beside the measured server. grpc-go's client has several goroutines and larger buffers.
//
// It does only what a client of ADS needs: a stream per connection, no compression, and requests that
// are small enough to be sent without waiting for the server's flow-control window.
package stream

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	// streamID is the only stream of a connection.
	streamID = 1
	// Window is the largest flow-control window of HTTP/2.
	Window = 1<<31 - 1
	// initialWindow is the window of a connection before any WINDOW_UPDATE (RFC 9113, section 6.9.2).
	initialWindow = 1<<16 - 1
	// readBuffer is the buffer of a connection. Longer frames bypass it.
	readBuffer = 4 << 10
	// prefixSize is the length of what precedes each gRPC message: a flag and its length.
	prefixSize = 5
	// maxMessage bounds a message.
	maxMessage = 256 << 20
	// maxFrame is the length of the longest frame that a server must accept (RFC 9113, section 4.2).
	maxFrame = 1 << 14
	// largeMessage is the length from which on messages are skimmed.
	largeMessage = 64 << 10
)

// ErrLeft is returned if the server has ended the stream without an error.
var ErrLeft = errors.New("the server has ended the stream")

// A Config has the settings that many streams share. Make one with [NewConfig].
type Config struct {
	// EstimateBandwidth makes the client send, for each message, the WINDOW_UPDATE and the PING with
	// which grpc-go estimates the bandwidth unless its windows are configured.
	EstimateBandwidth bool

	opening []byte // what is sent before the first message
	window  uint32 // of flow control, of the connection and of the stream
}

// NewConfig returns the Config of streams of a method, such as "/package.Service/Method". scheme is
// "http" or "https".
func NewConfig(scheme, authority, method string) *Config {
	return newConfig([][2]string{
		{":method", "POST"}, {":scheme", scheme}, {":path", method}, {":authority", authority},
		{"content-type", "application/grpc"}, {"user-agent", "nametap-bench"}, {"te", "trailers"},
	}, Window)
}

func newConfig(headers [][2]string, window uint32) *Config {
	var block, out bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range headers {
		_ = encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) // a bytes.Buffer takes all
	}
	framer := http2.NewFramer(&out, nil)
	out.WriteString(http2.ClientPreface)
	_ = errors.Join( // a bytes.Buffer takes all
		framer.WriteSettings(http2.Setting{ID: http2.SettingEnablePush}, http2.Setting{ID: http2.SettingInitialWindowSize, Val: window}),
		framer.WriteWindowUpdate(0, window-initialWindow),
		framer.WriteHeaders(http2.HeadersFrameParam{StreamID: streamID, BlockFragment: block.Bytes(), EndHeaders: true}),
	)
	return &Config{opening: out.Bytes(), window: window}
}

// A Stream is an open stream. Only one goroutine uses it, except that any goroutine may close the connection.
type Stream struct {
	// Skim is called with the parts of each message of 64 KiB or more, which Receive then returns as an empty
	// message: ten thousand tables that arrive at the same time would need more memory than there is. If Skim
	// is nil, Receive returns all messages.
	Skim func(part []byte)

	conn net.Conn
	cfg  *Config
	in   *bufio.Reader

	received []byte // bytes of DATA frames, in a buffer of the pool; nil if there are none
	taken    int    // bytes of received that were returned
	skimming int    // bytes of a message that are still to be skimmed
	consumed uint32 // bytes of DATA frames for which the server has no credit yet
	pinging  bool   // a PING of the client has no answer yet

	headers *hpack.Decoder // nil before the first header
	ending  bool           // the block of headers is the last one
	fields  map[string]string
}

// Open begins a stream on a new connection, with its first request.
func Open(conn net.Conn, cfg *Config, first []byte) (*Stream, error) {
	s := &Stream{conn: conn, cfg: cfg, in: bufio.NewReaderSize(conn, readBuffer)}
	return s, s.write(func(w *writer) {
		w.buffer.Write(cfg.opening)
		w.message(first)
	})
}

// Send sends a request.
func (s *Stream) Send(request []byte) error {
	return s.write(func(w *writer) { w.message(request) })
}

// Receive returns the next message, which is valid until the next call. It also answers the PINGs
// and SETTINGS of the server. It returns an error if the stream has ended.
func (s *Stream) Receive() ([]byte, error) {
	for {
		if m, err := s.take(); m != nil || err != nil {
			return m, err
		}
		s.compact()
		if err := s.frame(); err != nil {
			return nil, err
		}
	}
}

// take returns the next message that was received, or nil.
func (s *Stream) take() ([]byte, error) {
	rest := s.received[s.taken:]
	if s.skimming > 0 {
		return s.skim(rest), nil
	}
	if len(rest) < prefixSize {
		return nil, nil
	}
	size := binary.BigEndian.Uint32(rest[1:])
	switch {
	case rest[0] != 0:
		return nil, errors.New("a compressed message, which was not asked for")
	case size > maxMessage:
		return nil, fmt.Errorf("a message of %d bytes: want at most %d", size, maxMessage)
	case size >= largeMessage && s.Skim != nil:
		s.taken += prefixSize
		s.skimming = int(size)
		return s.skim(rest[prefixSize:]), nil
	case len(rest) < prefixSize+int(size):
		return nil, nil
	}
	end := prefixSize + int(size)
	s.taken += end
	return rest[prefixSize:end:end], nil
}

// skim passes the received bytes of a large message to Skim. At the end of the message it returns an empty
// message, otherwise nil.
func (s *Stream) skim(rest []byte) []byte {
	n := min(len(rest), s.skimming)
	s.Skim(rest[:n])
	s.taken += n
	if s.skimming -= n; s.skimming > 0 {
		return nil
	}
	return []byte{}
}

// compact gives up the received bytes that were returned.
func (s *Stream) compact() {
	if s.taken == len(s.received) {
		if s.received != nil && cap(s.received) <= maxPooled {
			empty := s.received[:0]
			buffers.Put(&empty)
		}
		s.received, s.taken = nil, 0
		return
	}
	s.received = s.received[:copy(s.received, s.received[s.taken:])]
	s.taken = 0
}

// frame reads a frame and does what it demands.
func (s *Stream) frame() error {
	h, err := http2.ReadFrameHeader(s.in)
	if err != nil {
		return err
	}
	switch h.Type {
	case http2.FrameData:
		return s.data(h)
	case http2.FrameHeaders, http2.FrameContinuation:
		return s.header(h)
	case http2.FrameRSTStream:
		payload, err := s.payload(h)
		if err != nil || len(payload) != 4 {
			return errors.Join(errors.New("the server resets the stream"), err)
		}
		return fmt.Errorf("the server resets the stream: %v", http2.ErrCode(binary.BigEndian.Uint32(payload)))
	case http2.FramePing:
		payload, err := s.payload(h)
		if h.Flags.Has(http2.FlagPingAck) {
			s.pinging = false
			return err
		}
		if err != nil || len(payload) != 8 {
			return err
		}
		return s.write(func(w *writer) { _ = w.framer.WritePing(true, [8]byte(payload)) })
	case http2.FrameSettings:
		_, err := s.payload(h)
		if err != nil || h.Flags.Has(http2.FlagSettingsAck) {
			return err
		}
		return s.write(func(w *writer) { _ = w.framer.WriteSettingsAck() })
	}
	// After a GOAWAY the stream continues until the server ends it, as in grpc-go.
	_, err = s.in.Discard(int(h.Length))
	return err
}

// payload returns the payload of a short frame.
func (s *Stream) payload(h http2.FrameHeader) ([]byte, error) {
	payload := make([]byte, h.Length)
	_, err := io.ReadFull(s.in, payload)
	return payload, err
}

// data adds the payload of a frame to what was received, and gives the server credit for it.
func (s *Stream) data(h http2.FrameHeader) error {
	if h.Flags.Has(http2.FlagDataPadded) {
		return errors.New("a DATA frame with padding, which no gRPC server sends")
	}
	if s.received == nil {
		s.received = *buffers.Get().(*[]byte) //nolint:forcetypeassert // the pool has no others
	}
	size := len(s.received)
	s.grow(size + int(h.Length))
	s.received = s.received[:size+int(h.Length)]
	if _, err := io.ReadFull(s.in, s.received[size:]); err != nil {
		return err
	}
	s.consumed += h.Length
	switch {
	case s.cfg.EstimateBandwidth && !s.pinging:
		s.pinging = true
		return s.credit(true)
	case s.consumed > s.cfg.window/4:
		return s.credit(false)
	}
	return nil
}

// grow makes room for size received bytes. If the length of the current message is known, grow makes room for the whole
// message.
func (s *Stream) grow(size int) {
	if size <= cap(s.received) {
		return
	}
	if rest := s.received[s.taken:]; len(rest) >= prefixSize && s.Skim == nil {
		whole := s.taken + prefixSize + int(min(binary.BigEndian.Uint32(rest[1:]), maxMessage))
		size = max(size, whole)
	}
	s.received = append(make([]byte, 0, max(size, 2*cap(s.received))), s.received...)
}

// credit lets the server send as much again as was received.
func (s *Stream) credit(ping bool) error {
	n := s.consumed
	s.consumed = 0
	return s.write(func(w *writer) {
		_ = w.framer.WriteWindowUpdate(0, n)
		_ = w.framer.WriteWindowUpdate(streamID, n)
		if ping {
			_ = w.framer.WritePing(false, [8]byte{2, 4, 16, 16, 9, 14, 7, 7})
		}
	})
}

// header decodes headers and trailers. It returns an error if the stream has ended.
func (s *Stream) header(h http2.FrameHeader) error {
	if s.headers == nil {
		s.fields = map[string]string{}
		s.headers = hpack.NewDecoder(4096, func(f hpack.HeaderField) { s.fields[f.Name] = f.Value })
	}
	payload, err := s.payload(h)
	if err != nil {
		return err
	}
	if _, err := s.headers.Write(payload); err != nil {
		return fmt.Errorf("decoding headers: %w", err)
	}
	s.ending = s.ending || h.Type == http2.FrameHeaders && h.Flags.Has(http2.FlagHeadersEndStream)
	if !s.ending || !h.Flags.Has(http2.FlagHeadersEndHeaders) {
		return nil
	}
	if status := s.fields["grpc-status"]; status != "0" {
		return fmt.Errorf("the server has ended the stream with status %q: %q", status, s.fields["grpc-message"])
	}
	return ErrLeft
}

// maxPooled bounds the buffers that are used again.
const maxPooled = 64 << 10

// buffers has buffers of received messages.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 1<<10); return &b }} //nolint:gochecknoglobals // a pool

// A writer collects frames.
type writer struct {
	buffer bytes.Buffer
	framer *http2.Framer
}

var writers = sync.Pool{New: func() any { //nolint:gochecknoglobals // a pool
	w := &writer{}
	w.framer = http2.NewFramer(&w.buffer, nil)
	return w
}}

// message adds a DATA frame with a gRPC message.
func (w *writer) message(m []byte) {
	var prefix [prefixSize]byte
	binary.BigEndian.PutUint32(prefix[1:], uint32(len(m))) //nolint:gosec // requests are short
	rest := slices.Concat(prefix[:], m)
	for len(rest) > 0 {
		n := min(len(rest), maxFrame)
		w.buffer.Write([]byte{byte(n >> 16), byte(n >> 8), byte(n), byte(http2.FrameData), 0, 0, 0, 0, streamID})
		w.buffer.Write(rest[:n])
		rest = rest[n:]
	}
}

// write sends the frames that add adds, in one write.
func (s *Stream) write(add func(*writer)) error {
	w := writers.Get().(*writer) //nolint:forcetypeassert // the pool has no others
	defer writers.Put(w)
	w.buffer.Reset()
	add(w)
	_, err := s.conn.Write(w.buffer.Bytes())
	return err
}
