package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// clientCommand is the first argument with which the test binary is a client of HTTP.
const clientCommand = "client"

// A fetch is what the client prints, as JSON.
type fetch struct {
	Proto string        // of the response
	Body  string        // of the response
	Took  time.Duration // all of it
	// HTTP3 is why there was no response over HTTP/3, and HTTP3Took how long that took.
	HTTP3     string
	HTTP3Took time.Duration
}

// runClient gets a URL as Go's client does, and prints a fetch. With -http3 it tries HTTP/3 first.
func runClient(args []string) int {
	flags := flag.NewFlagSet(clientCommand, flag.ExitOnError)
	try3 := flags.Bool("http3", false, "try HTTP/3 first")
	unconnected := flags.Bool("unconnected", false, "use a UDP socket that is not connected")
	ca := flags.String("ca", "", "file with the certificate")
	_ = flags.Parse(args) // it exits on errors
	result, err := get(flags.Arg(0), *ca, *try3, *unconnected)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// get gets a URL.
func get(url, ca string, try3, unconnected bool) (result fetch, err error) {
	began := time.Now()
	defer func() { result.Took = time.Since(began) }()
	text, err := os.ReadFile(ca)
	if err != nil {
		return result, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(text)
	config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	if try3 {
		transport := &http3.Transport{TLSClientConfig: config}
		if !unconnected {
			transport.Dial = dialConnected
		}
		defer transport.Close()
		err := fetchBy(transport, url, &result)
		result.HTTP3Took = time.Since(began)
		if err == nil {
			return result, nil
		}
		result.HTTP3 = err.Error()
	}
	return result, fetchBy(&http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}, url, &result)
}

// fetchBy gets a URL by one transport.
func fetchBy(transport http.RoundTripper, url string, into *fetch) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	into.Proto, into.Body = response.Proto, string(body)
	return err
}

// dialConnected connects by QUIC over a connected UDP socket, as browsers and curl do: the kernel tells
// only these about ICMP errors.
func dialConnected(ctx context.Context, addr string, config *tls.Config, quicConfig *quic.Config) (*quic.Conn, error) {
	var dialer net.Dialer
	socket, err := dialer.DialContext(ctx, "udp", addr)
	if err != nil {
		return nil, err
	}
	conn, err := quic.Dial(ctx, connected{socket}, socket.RemoteAddr(), config, quicConfig)
	if err != nil {
		socket.Close()
	}
	return conn, err
}

// A connected is a connected UDP socket with the methods of one that is not.
type connected struct{ net.Conn }

// ReadFrom and WriteTo are those of [net.PacketConn].
func (c connected) ReadFrom(b []byte) (int, net.Addr, error) {
	n, err := c.Read(b)
	return n, c.RemoteAddr(), err
}

func (c connected) WriteTo(b []byte, _ net.Addr) (int, error) { return c.Write(b) }
