package test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// web starts an HTTP server on the other machine that answers with its name, the Host and the version
// of HTTP; with TLS also HTTP/2.
func (e *egressVM) web(addr, name string, withTLS bool) {
	e.tb.Helper()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s %s\n", name, r.Host, r.Proto)
	})
	server := httptest.NewUnstartedServer(handler)
	server.Listener.Close()
	var err error
	e.net.Run(func() { server.Listener, err = net.Listen("tcp", addr) })
	if err == nil {
		err = http2.ConfigureServer(server.Config, nil) //nolint:staticcheck // as in the agent, net/http has no HTTP/2
	}
	if err != nil {
		e.tb.Fatal(err)
	}
	server.EnableHTTP2 = true
	if withTLS {
		server.StartTLS()
	} else {
		server.Start()
	}
	e.tb.Cleanup(server.Close)
}

// E2, E5: behind the VIP of a wildcard the SNI or the Host field chooses the host. The client is
// curl, with HTTP/1.1 and HTTP/2, over both families.
func TestEgressWildcard(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two", "[" + server6A + "]": "one", "[" + server6B + "]": "two"} {
		e.web(addr+":443", name, true)
		e.web(addr+":80", name, false)
	}
	e.capture()
	for _, vip := range []string{vipWild, "[" + vip6Wild + "]"} {
		for name, server := range map[string]string{"a.apps.example.org": "one", "b.apps.example.org": "two", "B.Apps.example.org": "two"} {
			for _, test := range []struct{ url, version, proto string }{
				{"https://" + name + "/", "--http1.1", "HTTP/1.1"},
				{"https://" + name + "/", "--http2", "HTTP/2.0"},
				{"http://" + name + "/", "--http1.1", "HTTP/1.1"},
			} {
				output := e.Exec("curl", "--silent", "--show-error", "--insecure", "--max-time", "20", test.version,
					"--connect-to", "::"+vip+":", test.url)
				want := strings.ToLower(server + " " + name + " " + test.proto)
				if got := strings.ToLower(strings.TrimSpace(output)); got != want {
					t.Errorf("%s of %s by %s: %q, want %q", test.url, vip, test.version, got, want)
				}
			}
		}
	}
}

// hello returns the ClientHello of crypto/tls for a name, with post-quantum key shares and some more
// bytes.
func hello(t *testing.T, name string, more int) []byte {
	t.Helper()
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	config := &tls.Config{ServerName: name, InsecureSkipVerify: true}
	for range more / 200 {
		config.NextProtos = append(config.NextProtos, strings.Repeat("x", 199))
	}
	go func() { _ = tls.Client(client, config).Handshake() }() // ends with the pipe
	var all []byte
	header := make([]byte, 5)
	for length := -1; length < 0 || len(all) < length; {
		if _, err := io.ReadFull(server, header); err != nil {
			t.Fatal(err)
		}
		fragment := make([]byte, int(header[3])<<8|int(header[4]))
		if _, err := io.ReadFull(server, fragment); err != nil {
			t.Fatal(err)
		}
		all = append(all, fragment...)
		length = 4 + (int(all[1])<<16 | int(all[2])<<8 | int(all[3]))
	}
	return all
}

// records splits a handshake message into records.
func records(message []byte) []byte {
	const size = 16_384
	var out []byte
	for len(message) > 0 {
		n := min(size, len(message))
		out = append(out, 22, 3, 1, byte(n>>8), byte(n))
		out = append(out, message[:n]...)
		message = message[n:]
	}
	return out
}

// refusals returns how many connections were refused for a reason.
func (e *egressVM) refusals(reason string) float64 {
	e.tb.Helper()
	return e.metric(fmt.Sprintf("nametap_egress_refusals_total{reason=%q}", reason))
}

// E3, E5: what says no name of the wildcard is reset, counted and logged, and nothing is dialled.
func TestEgressNames(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	dialled := make(chan string, 100)
	for _, addr := range []string{serverA, serverB} {
		for _, port := range []string{"443", "80"} {
			e.net.Serve(addr+":"+port, func(*net.TCPConn) { dialled <- addr + ":" + port })
		}
	}
	e.resolve("other.example.org", serverA)
	a := e.capture()
	long := records(append([]byte{1, 1, 0, 1}, make([]byte, 70_000)...))
	for _, test := range []struct {
		name, reason string
		sent         []byte
	}{
		{"another name", "other_name", records(hello(t, "other.example.org", 0))},
		{"the suffix itself", "other_name", records(hello(t, "apps.example.org", 0))},
		{"no name", "no_name", records(hello(t, "10.0.0.11", 0))}, // addresses are not sent
		{"another host", "other_name", []byte("GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n")},
		{"no host", "no_name", []byte("GET / HTTP/1.0\r\n\r\n")},
		{"two hosts", "protocol", []byte("GET / HTTP/1.1\r\nHost: a.apps.example.org\r\nHost: other.example.org\r\n\r\n")},
		{"not a hostname", "other_name", []byte("GET / HTTP/1.1\r\nHost: a/b.apps.example.org\r\n\r\n")},
		{"HTTP/2 without TLS", "protocol", []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")},
		{"another protocol", "protocol", []byte("\x00\x01\x02\x03")},
		{"too long", "protocol", long},
		{"stalled", "slow", records(hello(t, "a.apps.example.org", 0))[:100]},
		{"silent", "slow", nil},
	} {
		before, slow, began := e.refusals(test.reason), e.refusals("slow"), time.Now()
		conn := e.mustDial(vipWild, "443")
		_, _ = conn.Write(test.sent) // which may fail, because the agent does not read all
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v, want a reset", test.name, err)
		}
		wait.Until(t, test.name+" is counted", func() bool {
			return e.refusals(test.reason) > before && strings.Contains(a.log.String(), "reason="+test.reason) ||
				e.refusals("slow") > slow && machine.excuses(t, began, time.Now()) // so it was slow
		})
	}
	select {
	case addr := <-dialled:
		t.Errorf("%s was dialled", addr)
	default:
	}
	conn := e.mustDial(vipWild, "443")
	if err := conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a client that ends its data before a name is not reset")
	}
	if n := e.refusals("closed"); n != 1 {
		t.Errorf("%v connections closed before a name, want 1", n)
	}
}

// E11, E19: a UDP packet to a VIP is refused at once, also if its socket is not connected, as those of some HTTP/3 clients.
func TestEgressUDP(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			e := newEgressVM(t, backend)
			e.capture()
			for _, vip := range []string{vipA, vip6A, unusedVIP} {
				if err := e.sendUDP(vip); !isRefused(err) {
					t.Errorf("%s: %v, want that it is refused", vip, err)
				}
				var conn *net.UDPConn
				var err error
				e.Run(func() { conn, err = net.ListenUDP("udp", nil) })
				if err == nil {
					_, err = conn.WriteToUDPAddrPort([]byte("initial"), netip.AddrPortFrom(netip.MustParseAddr(vip), 443))
					conn.Close()
				}
				if !isRefused(err) {
					t.Errorf("%s, a socket that is not connected: %v, want that it is refused", vip, err)
				}
			}
		})
	}
}

// isRefused reports whether a packet was refused: in sendmsg(2), or by an ICMP error.
func isRefused(err error) bool {
	return errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ECONNREFUSED)
}

// sendUDP sends packets to port 4433 of an address, as a client repeats them, and waits for an answer. The error says why
// there is none.
func (e *egressVM) sendUDP(addr string) error {
	e.tb.Helper()
	var conn net.Conn
	var err error
	e.Run(func() { conn, err = net.Dial("udp", net.JoinHostPort(addr, "4433")) })
	if err != nil {
		return err
	}
	defer conn.Close()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		if _, err = conn.Write([]byte("initial")); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return err
}
