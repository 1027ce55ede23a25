package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// An attack is what pods of one tenant do to a control plane until a context ends.
type attack struct {
	name string // for readers
	// pods is how many pods take part, and each is how many goroutines of a pod.
	pods, each int
	token      string        // with which the pods connect
	again      time.Duration // after which they do it again
	do         func(ctx context.Context, p pod)
}

// attacks returns the attacks.
func attacks() []attack {
	labels := map[string]any{}
	for i := range 40_000 {
		labels[fmt.Sprintf("label-%d-%s", i, strings.Repeat("x", 80))] = "x"
	}
	const retry, again = 500 * time.Millisecond, 10 * time.Millisecond
	big := request("evil", tableType, map[string]any{"LABELS": labels})
	structure := request("evil", otherType, map[string]any{"OTHER": slices.Repeat([]any{nil}, 15_000)}) // large in memory
	longID := request(strings.Repeat("n", 1<<20), tableType, nil)
	var namespaces, tokens atomic.Int64
	return []attack{
		{"nodes of 4 MiB without proof", 1, 100, "", retry, func(ctx context.Context, p pod) { p.hold(ctx, big) }},
		{"nodes of 60 KiB with a token", 1, 100, "evil", retry, func(ctx context.Context, p pod) { p.hold(ctx, structure) }},
		{"node ids of 1 MiB", 1, 10, "", retry, func(ctx context.Context, p pod) { p.hold(ctx, longID) }},
		{"messages that are half sent", 1, 240, "", retry, func(ctx context.Context, p pod) { p.half(ctx, 16<<10) }},
		{"messages in frames of a byte", 2, 20, "", retry, func(ctx context.Context, p pod) { p.half(ctx, 1) }},
		{"streams that request no table", 4, 80, "", retry, func(ctx context.Context, p pod) { p.hold(ctx, request("evil", otherType, nil)) }},
		{"streams with a token", 4, 60, "evil", retry, func(ctx context.Context, p pod) { p.hold(ctx, request("evil", tableType, nil)) }},
		{"connections that send nothing", 4, 100, "evil", retry, func(ctx context.Context, p pod) { p.wait(ctx) }},
		{"new namespaces", 2, 4, "", again, func(ctx context.Context, p pod) {
			_, _ = p.table(ctx, fmt.Sprint("n", namespaces.Add(1)))
		}},
		{"tokens that are made up", 2, 4, "made-up", again, func(ctx context.Context, p pod) {
			p.token = fmt.Sprint("made-up-", tokens.Add(1))
			_, _ = p.table(ctx, "evil")
		}},
	}
}

// start starts the attack from addresses of its own. It ends with ctx.
func (a attack) start(ctx context.Context, p *plane, number int, running *sync.WaitGroup) {
	for i := range a.pods {
		attacker := pod{plane: p, ip: fmt.Sprintf("198.19.%d.%d", number+1, i+1), token: a.token}
		for range a.each {
			running.Go(func() {
				for ctx.Err() == nil {
					a.do(ctx, attacker)
					pause(ctx, a.again)
				}
			})
		}
	}
}

// hold opens a stream, sends a message, reads nothing and stays until the stream ends.
func (p pod) hold(ctx context.Context, message []byte) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := p.open(ctx)
	if err == nil && stream.SendMsg(message) == nil {
		for err = nil; err == nil; {
			err = stream.RecvMsg(new([]byte))
		}
	}
}

// wait opens a connection, and sends nothing.
func (p pod) wait(ctx context.Context) {
	conn, err := p.dial(ctx)
	if err != nil {
		return
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	_, _ = io.Copy(io.Discard, conn)
}

// half opens a stream, and sends most of a message of 1 MiB, in frames of a size.
func (p pod) half(ctx context.Context, size int) {
	conn, err := p.dial(ctx)
	if err != nil {
		return
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer conn.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, conn)
	}()
	err = openRaw(conn, []byte{0, 0, 0x0f, 0xff, 0xff}) // a message of almost 1 MiB, not compressed
	pause(ctx, time.Second)                             // until the server has permitted as much
	frame, batch := make([]byte, size), new(bytes.Buffer)
	for sent := 0; err == nil && sent < 960<<10; sent += size {
		_ = http2.NewFramer(batch, nil).WriteData(1, false, frame)
		if batch.Len() > 8<<10 {
			_, err = batch.WriteTo(conn)
			pause(ctx, 2*time.Millisecond)
		}
	}
	if err == nil {
		<-ended
	}
}

// openRaw opens a stream on a new connection, permits the server to send 1 GiB, and sends the first data.
func openRaw(conn net.Conn, data []byte) error {
	var headers bytes.Buffer
	encoder := hpack.NewEncoder(&headers)
	for _, field := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"}, {":path", adsMethod}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		if err := encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			return err
		}
	}
	framer := http2.NewFramer(conn, nil)
	_, err := io.WriteString(conn, http2.ClientPreface)
	return errors.Join(err, framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30}), framer.WriteWindowUpdate(0, 1<<30),
		framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers.Bytes(), EndHeaders: true}),
		framer.WriteData(1, false, data))
}

// TestAttacks lets tenants attack a control plane in all the ways that they have. The memory stays within the limit, and
// clients of another namespace are served meanwhile, those that connect, and those that are connected.
func TestAttacks(t *testing.T) { // D33, D61, D62, D63
	const clients, ended = 2, 1000          // clients of another namespace, and streams of attackers that end
	p := startPlane(t, "--max-clients=700") // fewer than attackers
	shop := pod{plane: p, ip: "198.19.0.1", token: "shop"}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	tables, why := shop.follow(ctx)
	wait.For(t, "a table", tables)
	for i, one := range attacks() {
		one.start(ctx, p, i, &running)
	}
	for n := 0; n < clients || p.metric("nametap_discovery_streams_ended_total") < ended; n++ {
		agent := pod{plane: p, ip: fmt.Sprintf("198.19.%d.%d", 100+n/250, 1+n%250), token: "shop"} // an address may not connect that often
		wait.Until(t, "a client of another namespace is served", func() bool {
			table, err := agent.table(ctx, "shop")
			if err == nil {
				return bytes.Contains(table, []byte("web.shop"))
			}
			t.Logf("a client of another namespace: %v", err)
			select {
			case <-p.ended:
				t.Fatal("the control plane has ended")
			default:
			}
			return false
		})
		pause(ctx, 100*time.Millisecond)
	}
	p.put("other", "10.0.0.2")
	for change := []byte(nil); !bytes.Contains(change, []byte("other.shop")); {
		if change = wait.For(t, "the change", tables); change == nil {
			t.Fatalf("the stream of a client of another namespace has ended: %v; %v connections have made room", why(), p.metric("nametap_connections_evicted_total"))
		}
	}
	t.Logf("memory %d MiB", p.peak())
	if peak := p.peak(); peak > limitMiB {
		t.Errorf("the control plane had %d MiB, want at most %d", peak, limitMiB)
	}
	for line := range strings.Lines(p.log.String()) {
		if len(line) > 2<<10 {
			t.Errorf("a line of the log has %d bytes: %.100s", len(line), line)
			break
		}
	}
}

// TestFullMemory lets pods of a tenant fill the memory with streams, more than there is memory for. Clients of other addresses
// get their tables, also new ones, and the memory stays within the limit.
func TestFullMemory(t *testing.T) { // D33, R23
	const memory, clients = 40, 5 // MiB, about 300 streams
	p := startPlaneWith(t, memory)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	evil := attack{"streams with a token", 3, 200, "evil", 500 * time.Millisecond, func(ctx context.Context, p pod) { p.hold(ctx, request("evil", tableType, nil)) }}
	evil.start(ctx, p, 1, &running)
	wait.Until(t, "the memory is full", func() bool {
		return p.metric(`nametap_discovery_streams_ended_total{reason="memory"}`)+p.metric("nametap_connections_evicted_total") > 0
	})
	for n := range clients {
		shop := pod{plane: p, ip: fmt.Sprintf("198.19.0.%d", n+1), token: "shop"}
		tables, why := shop.follow(ctx)
		if wait.For(t, "a table", tables) == nil {
			t.Errorf("a client of another namespace is refused: %v", why())
		}
	}
	t.Logf("memory %d MiB, %v clients", p.peak(), p.metric("nametap_discovery_clients"))
	if peak := p.peak(); peak > limitMiB {
		t.Errorf("the control plane had %d MiB, want at most %d", peak, limitMiB)
	}
}
