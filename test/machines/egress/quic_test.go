package egress

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
)

// fetch runs the client.
func (w *world) fetch(options string, args ...string) (result fetch) {
	w.tb.Helper()
	self, err := os.Executable()
	if err != nil {
		w.tb.Fatal(err)
	}
	output := w.client(options, append([]string{self, clientCommand}, args...)...)
	if err := json.Unmarshal([]byte(output), &result); err != nil {
		w.tb.Fatalf("the client prints %q: %v", output, err)
	}
	return result
}

// startHTTP3 starts a server of HTTP/3 on the addresses of siteA.
func (w *world) startHTTP3(cert, key string) {
	w.tb.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		w.tb.Fatal(err)
	}
	server := &http3.Server{
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s %s %s\n", siteA, r.Host, r.Proto)
		}),
	}
	w.tb.Cleanup(func() { server.Close() })
	v4, v6 := addresses(siteA)
	for _, addr := range []string{v4, v6} {
		var socket *net.UDPConn
		w.network.Run(func() { socket, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(addr), Port: 443}) })
		if err != nil {
			w.tb.Fatal(err)
		}
		w.tb.Cleanup(func() { socket.Close() })
		go func() { _ = server.Serve(socket) }() // ends with the socket
	}
}

// E19: a client that tries HTTP/3 first uses it for a name outside the mesh. For a name whose address is a VIP it learns at
// once that there is no version of QUIC, and uses HTTP/2, also if its UDP socket is not connected.
func TestQUIC(t *testing.T) {
	w := newWorld(t, nil, "nginx")
	cert := w.startWeb("")
	w.startHTTP3(cert, w.dir+"/key.pem")
	for _, options := range []string{"", "no-aaaa"} {
		for _, socket := range []string{"-unconnected=false", "-unconnected"} {
			got := w.fetch(options, "-http3", socket, "-ca", cert, "https://"+outside+"/")
			if want := siteA + " " + outside + " HTTP/3.0\n"; got.Body != want {
				t.Fatalf("%s, options %q: a name outside the mesh: %+v, want %q", socket, options, got, want)
			}
		}
		for _, socket := range []string{"-unconnected=false", "-unconnected"} {
			var refused, all []time.Duration
			for range 20 {
				got := w.fetch(options, "-http3", socket, "-ca", cert, "https://"+siteA+"/")
				if want := siteA + " " + siteA + " HTTP/2.0\n"; got.Body != want || !strings.Contains(got.HTTP3, "no compatible QUIC version found") {
					t.Fatalf("%s, options %q: %+v, want %q", socket, options, got, want)
				}
				refused, all = append(refused, got.HTTP3Took), append(all, got.Took)
			}
			slices.Sort(refused)
			slices.Sort(all)
			t.Logf("%s, options %q, 20 requests: HTTP/3 was refused after %v (p50) and at most %v, the response over HTTP/2 came after %v (p50) and at most %v",
				socket, options, refused[10], refused[19], all[10], all[19])
			if refused[19] > time.Second {
				t.Errorf("%s, options %q: HTTP/3 was refused after %v, want at once", socket, options, refused[19])
			}
		}
	}
}
