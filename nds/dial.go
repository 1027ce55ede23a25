package nds

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

const (
	// connectTimeout bounds lookup, TCP connect and TLS handshake.
	connectTimeout = 10 * time.Second

	// A peer that vanished without closing the connection is noticed after both
	// together. istiod answers "too_many_pings" to more than one in 15 s.
	pingAfter   = 20 * time.Second
	pingTimeout = 10 * time.Second
)

// maxPingAfter is the interval that every gRPC server permits unless it is told
// otherwise, and a little more.
const maxPingAfter = 6 * time.Minute

// pingLess makes later connections ping half as often, since the server of this one
// ended it for too many pings. A dead host is still noticed by TCP.
func (c *Client) pingLess() {
	c.pingAfter = min(2*c.pingAfter, maxPingAfter)
	c.log.Warn("the control plane, or a proxy before it, does not permit so many pings: a peer that hangs is noticed later",
		"reason", "too many pings", "every", c.pingAfter)
}

// dial prepares a connection to addr, of its own for each attempt, so that the address
// is looked up and the credentials are read again. A connection that is silent for
// pings is asked for a sign of life.
func dial(cfg Config, addr string, pings time.Duration, proof connectionCredentials) (*grpc.ClientConn, error) {
	// A dead host is noticed within 25 s by TCP itself, also where HTTP/2 pings are
	// not welcome.
	dialer := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}
	opts := append([]grpc.DialOption{
		// The stream is made for the mesh; HTTPS_PROXY is not meant for it.
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", addr)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(cfg.MaxPushBytes)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: connectTimeout}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pings, Timeout: pingTimeout}),
	}, proof.options...)
	// The system's resolver looks the host up as part of the dial.
	conn, err := grpc.NewClient("passthrough:///"+addr, opts...)
	if err != nil {
		return nil, fmt.Errorf("preparing the connection to %q: %w", addr, err)
	}
	return conn, nil
}
