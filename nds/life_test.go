package nds_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/keepalive"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// A peer is the server's end of a connection, which reads the preface of HTTP/2 and then does what a test wants.
type peer func(framer *http2.Framer) error

// connect returns the client's end of a connection to the peer. secure, if not nil, wraps the peer's end.
func (p peer) connect(secure func(net.Conn) net.Conn) net.Conn {
	near, far := net.Pipe()
	if secure != nil {
		far = secure(far)
	}
	go func() {
		defer far.Close()
		if _, err := io.CopyN(io.Discard, far, int64(len(http2.ClientPreface))); err == nil {
			_ = p(http2.NewFramer(far, far))
		}
	}()
	return near
}

// peers returns a configuration whose connections are to peers, and the number of connections so far.
func peers(serve peer) (config func(*nds.Config), count *atomic.Int64) {
	count = new(atomic.Int64)
	return func(cfg *nds.Config) {
		cfg.Dial = func(context.Context, string) (net.Conn, error) {
			count.Add(1)
			return serve.connect(nil), nil
		}
	}, count
}

// anyTime is the type of no frame.
const anyTime http2.FrameType = 0xff

// answer returns a peer that reads a frame of a type, answers it, and then reads until the client ends the connection.
func answer(read http2.FrameType, writes ...func(*http2.Framer) error) peer {
	return func(framer *http2.Framer) error {
		err := framer.WriteSettings()
		for err == nil && read != anyTime {
			var frame http2.Frame
			if frame, err = framer.ReadFrame(); err == nil && frame.Header().Type == read {
				break
			}
		}
		for _, write := range writes {
			err = cmp.Or(err, write(framer))
		}
		if err != nil {
			return err
		}
		return readAll(framer)
	}
}

// readAll is a peer that answers nothing.
func readAll(framer *http2.Framer) (err error) {
	for err == nil {
		_, err = framer.ReadFrame()
	}
	return err
}

// drain ends the connection.
func drain(f *http2.Framer) error { return f.WriteGoAway(0, http2.ErrCodeNo, []byte("draining")) }

// permitNone permits no further stream.
func permitNone(f *http2.Framer) error {
	return f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 0})
}

// C5, C10: an attempt has one connection. The client backs off from a server that ends each connection at once, whether
// before or after it has read the request.
func TestEndedAtOnce(t *testing.T) {
	t.Parallel()
	refuse := func(f *http2.Framer) error { return f.WriteRSTStream(1, http2.ErrCodeRefusedStream) }
	for _, tc := range []struct {
		name   string
		serve  peer
		logged string
	}{
		{"GOAWAY before a stream", answer(anyTime, drain), "the server ended the connection before it opened a stream (GOAWAY)"},
		{"GOAWAY after the request", answer(http2.FrameData, drain), "the server ended the connection before it opened a stream (GOAWAY)"},
		{"stream refused, no other permitted", answer(http2.FrameData, permitNone, refuse), "REFUSED_STREAM"},
		{"end before the settings", func(*http2.Framer) error { return nil }, "code = Unavailable"},
	} {
		subtest(t, tc.name, func(t *testing.T) {
			t.Helper()
			config, connections := peers(tc.serve)
			h := start(t, options{config: config})
			clock.Sleep(h.ctx, 15*time.Second)
			h.wantLog("level=WARN", "no stream to the control plane", tc.logged)
			attempts := int64(h.client.Status().Reconnects) + 1
			if n := connections.Load(); n > 30 || n > attempts+1 || n < 4 {
				t.Errorf("%d connections, %d attempts", n, attempts)
			}
		})
	}
}

// C1, C5: the same for a certificate authority.
func TestAuthorityEndedAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := startCertified(t, nil)
		certificate, key := c.authority.Server()
		pair, err := tls.X509KeyPair([]byte(certificate), []byte(key))
		if err != nil {
			t.Fatal(err)
		}
		secure := func(conn net.Conn) net.Conn {
			return tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}})
		}
		const authority = "127.0.0.1:15013"
		var connections atomic.Int64
		h := c.start(t, func(cfg *nds.Config) {
			cfg.CAAddr = authority
			cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				if addr != authority {
					return c.server.Dial(ctx, addr)
				}
				connections.Add(1)
				return answer(anyTime, drain).connect(secure), nil
			}
		})
		clock.Sleep(h.ctx, 15*time.Second)
		h.wantLog("level=WARN", "workload certificate not obtained or renewed", "ended the connection before it opened a stream (GOAWAY)")
		if n := connections.Load(); n < 3 || n > 15 {
			t.Errorf("%d connections", n)
		}
	})
}

// C5: a stream that works goes on after GOAWAY, for as long as the server lets it. Then the client connects again, without
// a warning.
func TestMaxAge(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		plane.Age = keepalive.ServerParameters{MaxConnectionAge: time.Minute, MaxConnectionAgeGrace: time.Minute}
		h := start(t, options{plane: plane})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		clock.Sleep(h.ctx, 90*time.Second)
		h.server.Push(hosts("b.example.com"))
		if r := h.wantAnswer("v2"); r.Stream != 1 {
			t.Errorf("the push was answered on stream %d", r.Stream)
		}
		if _, err := h.server.WaitStream(h.ctx, 2); err != nil {
			t.Fatal(err)
		}
		if n := h.logs.Count("level=WARN", "no stream"); n != 0 {
			t.Errorf("%d warnings", n)
		}
	})
}

// C5: an attempt fails if the server permits no stream, or does not answer at all.
func TestNoStream(t *testing.T) {
	t.Parallel()
	none := func(f *http2.Framer) error { return cmp.Or(permitNone(f), readAll(f)) }
	for name, serve := range map[string]peer{"no stream permitted": none, "no HTTP/2": readAll} {
		subtest(t, name, func(t *testing.T) {
			t.Helper()
			config, connections := peers(serve)
			h := start(t, options{config: config})
			clock.Sleep(h.ctx, 10*time.Second+time.Millisecond)
			h.wantLog("level=WARN", "the server accepted the connection, but no stream within 10s")
			h.wantStatus(func(s nds.Status) bool { return !s.Open && s.LastError != "" })
			clock.Sleep(h.ctx, 50*time.Second)
			if n := connections.Load(); n < 4 || n > 7 {
				t.Errorf("%d connections in a minute", n)
			}
		})
	}
}

// C5: a server may take nearly 10 s to permit a stream.
func TestLateStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		config, connections := peers(func(f *http2.Framer) error {
			err := permitNone(f)
			late := time.AfterFunc(9*time.Second, func() {
				_ = f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1})
			})
			defer late.Stop()
			return cmp.Or(err, readAll(f))
		})
		h := start(t, options{config: config})
		clock.Sleep(h.ctx, 20*time.Second)
		h.wantStatus(func(s nds.Status) bool { return s.Open && s.LastError == "" })
		if n := connections.Load(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}

// C5: a stream without an answer stays open, because a control plane may be slow to make the first table. Log and status
// name it.
func TestSilentServer(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		h := start(t, options{plane: plane})
		clock.Sleep(h.ctx, 30*time.Second+time.Millisecond)
		h.wantLog("level=WARN", "no table from the control plane so far", "sent no table for 30s")
		h.wantStatus(func(s nds.Status) bool { return s.Open && !s.Connected && s.LastError != "" })
		clock.Sleep(h.ctx, time.Minute)
		h.server.Push(hosts("a.example.com"))
		if r := h.wantAnswer("v1"); r.Stream != 1 {
			t.Errorf("the push was answered on stream %d", r.Stream)
		}
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.LastError == "" })
	})
}

// C2: a client that fell back to state-of-the-world uses the incremental variant after an upgrade of the control plane.
func TestIncrementalAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		older, newer := serve(t, sotw()), serve(t, fakexds.Options{})
		older.Push(hosts("a.example.com"))
		newer.Push(hosts("a.example.com"))
		server := new(atomic.Pointer[fakexds.Server])
		server.Store(older)
		h := start(t, options{server: newer, config: func(cfg *nds.Config) {
			cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return server.Load().Dial(ctx, addr) }
		}})
		h.wantLog("level=WARN", "the control plane has no incremental ADS, using state-of-the-world")
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Variant == "sotw" && s.Reconnects == 0 })
		server.Store(newer)
		older.Stop()
		h.wantACK("v1")
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.Variant == "incremental" })
	})
}
