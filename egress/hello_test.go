package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// errStop ends a handshake of crypto/tls once it has parsed the ClientHello.
var errStop = errors.New("stop")

// byCryptoTLS returns the server name that crypto/tls finds in the ClientHello at the start of b. It
// reports false if it finds no valid ClientHello.
func byCryptoTLS(b []byte) (name string, ok bool) {
	server := tls.Server(&onlyRead{rest: b}, &tls.Config{
		MinVersion: tls.VersionTLS10,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = hello.ServerName, true
			return nil, errStop
		},
	})
	_ = server.HandshakeContext(context.Background()) // it ends with errStop, or b is not valid
	return name, ok
}

// An onlyRead is a connection that only reads.
type onlyRead struct{ rest []byte }

func (o *onlyRead) Read(b []byte) (int, error) {
	if len(o.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, o.rest)
	o.rest = o.rest[n:]
	return n, nil
}
func (*onlyRead) Write(b []byte) (int, error)      { return len(b), nil }
func (*onlyRead) Close() error                     { return nil }
func (*onlyRead) LocalAddr() net.Addr              { return nil }
func (*onlyRead) RemoteAddr() net.Addr             { return nil }
func (*onlyRead) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (*onlyRead) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (*onlyRead) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// clientHello returns the first flight of crypto/tls.
func clientHello(tb testing.TB, config *tls.Config) []byte {
	tb.Helper()
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	go func() { _ = tls.Client(client, config).Handshake() }() // ends with the pipe
	b := make([]byte, 1<<17)
	n, err := server.Read(b)
	if err != nil {
		tb.Fatal(err)
	}
	return b[:n:n]
}

// resplit returns records with the same bytes, each of up to size bytes.
func resplit(flight []byte, size int) []byte {
	var out []byte
	for message := flight[recordHeaderLen:]; len(message) > 0; {
		n := min(size, len(message))
		out = append(out, recordHandshake, 3, 1, byte(n>>8), byte(n))
		out = append(out, message[:n]...)
		message = message[n:]
	}
	return out
}

// E5: each proper prefix of a hello needs more, whatever its records are.
func TestHelloPrefixes(t *testing.T) {
	t.Parallel()
	flight := clientHello(t, &tls.Config{ServerName: "a.example.org", InsecureSkipVerify: true})
	for _, size := range []int{1, 2, 5, 100, len(flight)} {
		split := resplit(flight, size)
		for i := range split {
			if _, err := helloName(split[:i]); !errors.Is(err, errMore) {
				t.Fatalf("%d of %d bytes in records of %d: %v, want that more are needed", i, len(split), size, err)
			}
		}
		if name, err := helloName(split); err != nil || name != "a.example.org" {
			t.Errorf("records of %d bytes: %q, %v", size, name, err)
		}
	}
}

// E3, E5: what is not a ClientHello with a name has an error.
func TestHelloErrors(t *testing.T) {
	t.Parallel()
	flight := clientHello(t, &tls.Config{ServerName: "a.example.org", InsecureSkipVerify: true})
	changed := func(at int, b byte) []byte {
		out := append([]byte(nil), flight...)
		out[at] = b
		return out
	}
	for want, b := range map[string][]byte{
		errNoName.Error():                    clientHello(t, &tls.Config{InsecureSkipVerify: true}),
		"record of type 23":                  changed(0, 23),
		"record of version 16":               changed(1, 16),
		"an empty record":                    {22, 3, 1, 0, 0},
		"a record of 65535 bytes":            {22, 3, 1, 255, 255},
		"handshake message of type 2":        changed(5, 2),
		"a ClientHello of 16777215 bytes":    {22, 3, 1, 0, 4, 1, 255, 255, 255},
		"the ClientHello's lengths do not m": changed(8, flight[8]-1),
	} {
		if _, err := helloName(b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// onlyHandshake reports whether all complete records are handshake records.
func onlyHandshake(b []byte) bool {
	for len(b) >= recordHeaderLen {
		if b[0] != recordHandshake {
			return false
		}
		b = b[min(len(b), recordHeaderLen+int(b[3])<<8+int(b[4])):]
	}
	return true
}

// FuzzHello compares the name with that of crypto/tls. A ClientHello that crypto/tls refuses may have
// a name here: the host decides about it. Alerts before a ClientHello are refused here only.
func FuzzHello(f *testing.F) {
	for _, flight := range flights(f) {
		f.Add(flight)
		f.Add(resplit(flight, 7))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		name, err := helloName(b)
		want, ok := byCryptoTLS(b)
		switch {
		case !ok || !onlyHandshake(b): // it is not valid, or it needs more bytes
		case want == "" && !errors.Is(err, errNoName), want != "" && (err != nil || name != want):
			t.Errorf("%q, %v, but crypto/tls finds %q", name, err, want)
		}
		if err == nil && name == "" {
			t.Error("an empty name without an error")
		}
	})
}

func BenchmarkHello(b *testing.B) {
	flight := clientHello(b, &tls.Config{ServerName: "a.example.org", InsecureSkipVerify: true})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := helloName(flight); err != nil {
			b.Fatal(err)
		}
	}
}
