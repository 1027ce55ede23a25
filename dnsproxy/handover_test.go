package dnsproxy_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// TestHandOverConnections hands a listening TCP socket from server to server while clients send
// queries. Clients that open a connection for each query lose none. On a connection that the
// client keeps, a query and the server's FIN may still cross, which is rare.
func TestHandOverConnections(t *testing.T) { // V1
	t.Parallel()
	var config net.ListenConfig
	tcp, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	address := tcp.Addr().String()
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	var answered, once, kept atomic.Int64 // queries with an answer; lost ones by the use of the connection
	const rounds, keepers = 50, 4
	for range keepers {
		clients.Go(func() { once.Add(askEachOnce(ctx, address, &answered)) })
		clients.Go(func() { kept.Add(askAllOnOne(ctx, address, &answered)) })
	}
	for range rounds {
		p := newProxy(t, dnsproxy.Config{Addr: address, Sockets: []*os.File{file(t, tcp)}, BeforeSync: dnsproxy.BeforeSyncHold})
		p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.1.0.1")})
		serving, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(serving) }()
		want := answered.Load() + 100
		wait.Until(t, "queries are answered", func() bool { return answered.Load() >= want })
		p.HandOver()
		end()
		if err := wait.For(t, "the server ends", ended); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	tcp.Close()
	clients.Wait()
	t.Logf("%d queries are answered; lost: %d on new connections, %d on older ones", answered.Load(), once.Load(), kept.Load())
	if once.Load() > 0 || kept.Load() > rounds*keepers/10 {
		t.Error("queries are lost")
	}
}

// askEachOnce sends queries until ctx ends, each over its own connection, and returns how many
// were lost.
func askEachOnce(ctx context.Context, address string, answered *atomic.Int64) (lost int64) {
	for ctx.Err() == nil {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			continue
		}
		switch err := askConn(conn); {
		case err == nil:
			answered.Add(1)
		case ctx.Err() == nil:
			lost++
		}
		conn.Close()
	}
	return lost
}

// askAllOnOne sends queries until ctx ends over one connection, as long as the server keeps it,
// and returns how many were lost.
func askAllOnOne(ctx context.Context, address string, answered *atomic.Int64) (lost int64) {
	var conn net.Conn
	for ctx.Err() == nil {
		if conn == nil {
			var err error
			if conn, err = net.Dial("tcp", address); err != nil {
				continue
			}
		}
		// The client notices that the server has closed the connection before it sends.
		_ = conn.SetReadDeadline(time.Now().Add(rand.N(5 * time.Millisecond)))
		if _, err := conn.Read(make([]byte, 1)); !os.IsTimeout(err) {
			conn.Close()
			conn = nil
			continue
		}
		switch err := askConn(conn); {
		case err == nil:
			answered.Add(1)
			continue
		case ctx.Err() == nil:
			lost++
		}
		conn.Close()
		conn = nil
	}
	if conn != nil {
		conn.Close()
	}
	return lost
}

// askConn sends a query and waits for the answer.
func askConn(conn net.Conn) error {
	client := dns.Client{Timeout: wait.Limit}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion("web.shop.svc.cluster.local.", dns.TypeA), &dns.Conn{Conn: conn})
	if err == nil && len(reply.Answer) != 1 {
		err = fmt.Errorf("%v", reply)
	}
	return err
}
