package stream

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
)

// A server is grpc-go's, with a handler for its streams.
type server struct {
	discoveryv3.UnimplementedAggregatedDiscoveryServiceServer
	handle func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error
}

func (s *server) DeltaAggregatedResources(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return s.handle(stream)
}

// serve starts a server, which pings its clients after a second.
func serve(t *testing.T, listener net.Listener, handle func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error) *grpc.Server {
	t.Helper()
	rpc := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second}))
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(rpc, &server{handle: handle})
	go func() { _ = rpc.Serve(listener) }()
	t.Cleanup(rpc.Stop)
	return rpc
}

// start starts a server, and returns a connection to it.
func start(t *testing.T, handle func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error) (net.Conn, *grpc.Server) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	rpc := serve(t, listener, handle)
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return conn, rpc
}

// startInMemory is start with a connection in memory, for a bubble of testing/synctest, where time passes at
// once.
func startInMemory(t *testing.T, handle func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error) (net.Conn, *grpc.Server) {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	rpc := serve(t, listener, handle)
	conn, err := listener.DialContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, rpc
}

const method = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"

func request(t *testing.T, nonce string) []byte {
	t.Helper()
	b, err := proto.Marshal(&discoveryv3.DeltaDiscoveryRequest{ResponseNonce: nonce})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// echo returns, for each request, a response with its nonce and as many more bytes as sizes has in turn.
func echo(sizes ...int) func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	return func(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
		for _, size := range sizes {
			r, err := stream.Recv()
			if err != nil {
				return err
			}
			if err := stream.Send(&discoveryv3.DeltaDiscoveryResponse{Nonce: r.GetResponseNonce(), SystemVersionInfo: strings.Repeat("x", size)}); err != nil {
				return err
			}
		}
		return nil
	}
}

// Messages of all sizes arrive whole, also messages of many frames that need more than the window,
// and the end of the stream has no error.
func TestMessages(t *testing.T) {
	t.Parallel()
	sizes := []int{0, 1, 300, readBuffer, 16 << 10, 700 << 10, 1 << 20, 10, 200 << 10, 0}
	for name, cfg := range map[string]*Config{
		"largest window":     NewConfig("http", "test", method),
		"small window":       newConfig([][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "test"}, {"content-type", "application/grpc"}, {"te", "trailers"}}, initialWindow+1),
		"bandwidth estimate": {EstimateBandwidth: true, opening: NewConfig("http", "test", method).opening, window: Window},
	} {
		t.Run(name, func(t *testing.T) {
			conn, _ := start(t, echo(sizes...))
			s, err := Open(conn, cfg, request(t, "0"))
			if err != nil {
				t.Fatal(err)
			}
			for i, size := range sizes {
				m, err := s.Receive()
				if err != nil {
					t.Fatal(err)
				}
				var r discoveryv3.DeltaDiscoveryResponse
				if err := proto.Unmarshal(m, &r); err != nil {
					t.Fatal(err)
				}
				if want := string(rune('0' + i)); r.GetNonce() != want || len(r.GetSystemVersionInfo()) != size {
					t.Fatalf("nonce %q with %d bytes, want %q with %d", r.GetNonce(), len(r.GetSystemVersionInfo()), want, size)
				}
				if i+1 == len(sizes) {
					break
				}
				if err := s.Send(request(t, string(rune('1'+i)))); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := s.Receive(); !errors.Is(err, ErrLeft) {
				t.Errorf("%v, want %v", err, ErrLeft)
			}
		})
	}
}

// Several messages that arrive in one read are returned one by one.
func TestMessagesTogether(t *testing.T) {
	t.Parallel()
	const n = 5000
	conn, _ := start(t, func(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
		for i := range n {
			if err := stream.Send(&discoveryv3.DeltaDiscoveryResponse{Nonce: strings.Repeat("n", i%50)}); err != nil {
				return err
			}
		}
		return nil
	})
	s, err := Open(conn, NewConfig("http", "test", method), request(t, ""))
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		m, err := s.Receive()
		if err != nil {
			t.Fatal(err)
		}
		want, err := proto.Marshal(&discoveryv3.DeltaDiscoveryResponse{Nonce: strings.Repeat("n", i%50)})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m, want) {
			t.Fatalf("message %d is %q, want %q", i, m, want)
		}
	}
}

// Large messages are skimmed, between others that are not.
func TestSkim(t *testing.T) {
	t.Parallel()
	sizes := []int{10, 2 << 20, largeMessage, 0, 300 << 10, 5}
	conn, _ := start(t, echo(sizes...))
	s, err := Open(conn, NewConfig("http", "test", method), request(t, "n"))
	if err != nil {
		t.Fatal(err)
	}
	var skimmed []byte
	s.Skim = func(part []byte) { skimmed = append(skimmed, part...) }
	for _, size := range sizes {
		skimmed = nil
		m, err := s.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if large := size >= largeMessage; large != (len(m) == 0) || cap(s.received) > maxPooled {
			t.Errorf("a message with %d bytes is returned with %d, and the buffer has %d", size, len(m), cap(s.received))
		} else if large {
			m = skimmed
		}
		var r discoveryv3.DeltaDiscoveryResponse
		if err := proto.Unmarshal(m, &r); err != nil || len(r.GetSystemVersionInfo()) != size {
			t.Errorf("%d bytes, want %d: %v", len(r.GetSystemVersionInfo()), size, err)
		}
		if err := s.Send(request(t, "n")); err != nil {
			t.Fatal(err)
		}
	}
}

// The client answers PINGs, without which the server would end the connection after a second and
// its timeout.
func TestPing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn, _ := startInMemory(t, func(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
			time.Sleep(time.Hour) //nolint:forbidigo // advances the clock of the bubble
			return stream.Send(&discoveryv3.DeltaDiscoveryResponse{Nonce: "alive"})
		})
		s, err := Open(conn, NewConfig("http", "test", method), request(t, ""))
		if err != nil {
			t.Fatal(err)
		}
		if m, err := s.Receive(); err != nil || !bytes.Contains(m, []byte("alive")) {
			t.Errorf("%q, %v", m, err)
		}
	})
}

// The error has the reason of the end of a stream: a status, or the connection's error.
func TestEnd(t *testing.T) {
	t.Parallel()
	conn, _ := start(t, func(discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
		return status.Error(codes.PermissionDenied, "not you")
	})
	s, err := Open(conn, NewConfig("http", "test", method), request(t, ""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Receive(); err == nil || !strings.Contains(err.Error(), `"7"`) || !strings.Contains(err.Error(), "not you") {
		t.Errorf("%v, want status 7 and the reason", err)
	}

	ready := make(chan struct{})
	conn, rpc := start(t, func(stream discoveryv3.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
		close(ready)
		<-stream.Context().Done()
		return context.Cause(stream.Context())
	})
	if s, err = Open(conn, NewConfig("http", "test", method), request(t, "")); err != nil {
		t.Fatal(err)
	}
	<-ready
	rpc.Stop()
	if _, err := s.Receive(); err == nil {
		t.Error("no error after the end of the server")
	}
}

// A GOAWAY, as at the age of a connection, does not end a stream that goes on. In a bubble, because the server
// may wait for five seconds for a client that has left.
func TestGoAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conn, rpc := startInMemory(t, echo(1, 1))
		s, err := Open(conn, NewConfig("http", "test", method), request(t, "0"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Receive(); err != nil {
			t.Fatal(err)
		}
		stopped := make(chan struct{})
		go func() {
			rpc.GracefulStop()
			close(stopped)
		}()
		synctest.Wait() // the GOAWAY is sent
		if err := s.Send(request(t, "1")); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Receive(); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Receive(); !errors.Is(err, ErrLeft) {
			t.Errorf("%v, want %v", err, ErrLeft)
		}
		<-stopped
	})
}

// A message that is not in gRPC's wire format is an error.
func TestMalformed(t *testing.T) {
	t.Parallel()
	for name, bytes := range map[string]string{
		"compressed": "\x00\x00\x05\x00\x00\x00\x00\x00\x01\x01\x00\x00\x00\x00",
		"too long":   "\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00\xff\xff\xff\xff",
		"padded":     "\x00\x00\x05\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00\x00",
		"cut":        "\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00",
		"reset":      "\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",
	} {
		t.Run(name, func(t *testing.T) {
			client, peer := net.Pipe()
			defer client.Close()
			go func() {
				_, _ = peer.Read(make([]byte, 1<<16))
				_, _ = peer.Write([]byte(bytes))
				peer.Close()
			}()
			s, err := Open(client, NewConfig("http", "test", method), nil)
			if err != nil {
				t.Fatal(err)
			}
			if m, err := s.Receive(); err == nil {
				t.Errorf("message %q, want an error", m)
			}
		})
	}
}
