package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// recordHandshake is the first byte of a ClientHello.
const recordHandshake = 22

// An onlyRead is a connection that only reads, up to size bytes at a time.
type onlyRead struct {
	from io.Reader
	size int
}

func (o *onlyRead) Read(b []byte) (int, error)     { return o.from.Read(b[:min(len(b), o.size)]) }
func (*onlyRead) Write(b []byte) (int, error)      { return len(b), nil }
func (*onlyRead) Close() error                     { return nil }
func (*onlyRead) LocalAddr() net.Addr              { return nil }
func (*onlyRead) RemoteAddr() net.Addr             { return nil }
func (*onlyRead) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (*onlyRead) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (*onlyRead) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// begin returns a beginning that arrives in segments of size bytes.
func begin(from io.Reader, size int) *beginning {
	b := &beginning{from: &onlyRead{from, size}, parsing: new(sync.Mutex)}
	b.hold = func(int64) bool { return true }
	return b
}

// byCryptoTLS returns the server name that crypto/tls finds in the ClientHello at the start of b. It
// reports false if it finds no valid ClientHello.
func byCryptoTLS(b []byte) (name string, ok bool) {
	server := tls.Server(&onlyRead{bytes.NewReader(b), 1 << 20}, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = hello.ServerName, true
			return nil, errStop
		},
	})
	_ = server.HandshakeContext(context.Background()) // it ends with errStop, or b is not valid
	return name, ok
}

// clientHello returns the first flight of crypto/tls.
func clientHello(tb testing.TB, config *tls.Config) []byte {
	tb.Helper()
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	config.InsecureSkipVerify = true
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
	for message := flight[5:]; len(message) > 0; {
		n := min(size, len(message))
		out = append(out, recordHandshake, 3, 1, byte(n>>8), byte(n))
		out = append(out, message[:n]...)
		message = message[n:]
	}
	return out
}

// FuzzHello checks that the segments of a connection change neither the name that crypto/tls finds nor the bytes
// that the host gets.
func FuzzHello(f *testing.F) {
	for _, config := range []*tls.Config{
		{ServerName: "a.example.org"}, {}, {ServerName: "b.example.org", MaxVersion: tls.VersionTLS12},
		{ServerName: "c.example.org", NextProtos: []string{"h2", "http/1.1"}, CurvePreferences: []tls.CurveID{tls.X25519}},
	} {
		flight := clientHello(f, config)
		f.Add(flight)
		f.Add(append(resplit(flight, 7), "early data"...))
	}
	f.Add([]byte("GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\nbody"))
	f.Fuzz(func(t *testing.T, input []byte) {
		want, ok := byCryptoTLS(input)
		for _, size := range []int{1, 7, 1 << 20} {
			b := begin(bytes.NewReader(input), size)
			name, err := b.name()
			if len(input) > 0 && input[0] == recordHandshake && len(input) < maxHello && (ok && want != "") != (err == nil) || err == nil && name == "" {
				t.Errorf("segments of %d bytes: %q, %v, but crypto/tls finds %q, %v", size, name, err, want, ok)
			}
			if err == nil && input[0] == recordHandshake && name != want {
				t.Errorf("segments of %d bytes: %q, but crypto/tls finds %q", size, name, want)
			}
			if rest, err := io.ReadAll(b.from); err != nil || !bytes.Equal(append(bytes.Clone(b.read), rest...), input) {
				t.Errorf("segments of %d bytes: what was read and what follows is not what was sent", size)
			}
		}
	})
}

// E5: each proper prefix of a hello needs more, whatever its records are.
func TestHelloPrefixes(t *testing.T) {
	t.Parallel()
	flight := clientHello(t, &tls.Config{ServerName: "a.example.org"})
	for _, size := range []int{10, len(flight)} {
		split := resplit(flight, size)
		for i := range split {
			if name, err := begin(bytes.NewReader(split[:i]), 1<<20).name(); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("%d of %d bytes in records of %d: %q, %v, want that more are needed", i, len(split), size, name, err)
			}
		}
		if name, err := begin(bytes.NewReader(split), 1<<20).name(); err != nil || name != "a.example.org" {
			t.Errorf("records of %d bytes: %q, %v", size, name, err)
		}
	}
}

// E3, E5: what is not a ClientHello with a name has an error, as soon as the first bytes say so.
func TestHelloErrors(t *testing.T) {
	t.Parallel()
	flight := clientHello(t, &tls.Config{ServerName: "a.example.org"})
	changed := func(at int, b byte) []byte {
		out := append([]byte(nil), flight...)
		out[at] = b
		return out
	}
	for want, input := range map[string][]byte{
		errNoName.Error():      clientHello(t, &tls.Config{}),
		"neither TLS nor HTTP": changed(0, 24),
		"does not look like a": changed(1, 16),
		"oversized record":     {22, 3, 1, 255, 255},
		"unexpected handshake": {22, 3, 1, 0, 4, 0, 0, 0, 0},
		"exceeds maximum of 6": {22, 3, 1, 0, 4, 1, 255, 255, 255},
		"error decoding messa": changed(8, flight[8]-1),
	} {
		if _, err := begin(bytes.NewReader(input), 1).name(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// An endless is a beginning, and then the same bytes again and again.
type endless struct {
	read func() // is called by each Read, unless it is nil

	first, again []byte
	rest         []byte
}

func (e *endless) Read(b []byte) (int, error) {
	if e.read != nil {
		e.read()
	}
	if len(e.rest) == 0 {
		e.rest, e.first = append(e.first, e.again...), nil
	}
	n := copy(b, e.rest)
	e.rest = e.rest[n:]
	return n, nil
}

// E5, E17: a beginning that does not end is read up to a bound, and its memory is given back.
func TestLongBeginnings(t *testing.T) {
	t.Parallel()
	for name, from := range map[string]endless{
		"a hello":  {first: []byte{22, 3, 1, 0, 4, 1, 0, 255, 255}, again: []byte{22, 3, 1, 0, 1, 0}},
		"a field":  {first: []byte("GET / HTTP/1.1\r\nX: "), again: []byte("x")},
		"fields":   {first: []byte("GET / HTTP/1.1\r\n"), again: []byte("X: x\r\n")},
		"a method": {again: bytes.Repeat([]byte("GET"), 1000)},
	} {
		again, held := from, int64(0)
		b := begin(&from, 1400)
		b.hold = func(n int64) bool {
			held += n
			return true
		}
		from.read = func() {
			if !b.parsing.TryLock() {
				t.Errorf("%s: other beginnings wait for this client", name)
				return
			}
			b.parsing.Unlock()
		}
		if _, err := b.name(); !errors.Is(err, errTooLong) || len(b.read) > maxHello+maxFraming+firstRead {
			t.Errorf("%s: %d bytes, %.80v", name, len(b.read), err)
		}
		if b.release(); held != 0 || !b.parsing.TryLock() {
			t.Errorf("%s: %d bytes are still reserved, or the lock is", name, held)
		}
		b = begin(&again, 1400)
		b.hold = func(int64) bool { return false }
		if _, err := b.name(); !errors.Is(err, errMemory) || len(b.read) > firstRead {
			t.Errorf("%s without memory: %d bytes, %.80v", name, len(b.read), err)
		}
	}
}

// E2, E3: the host of a request, or why it has none.
func TestHTTPName(t *testing.T) {
	t.Parallel()
	for request, want := range map[string]string{
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                               "a.example.org",
		"GET / HTTP/1.1\nhost:a.example.org:8080\n\n":                                 "a.example.org",
		"POST /x HTTP/1.0\r\nAccept: */*\r\nHOST:  a.example.org \r\n\r\nHost: b\r\n": "a.example.org",
		"GET http://b.example.org:80/ HTTP/1.1\r\nHost: b.example.org\r\n\r\n":        "b.example.org",
		"GET http://b.example.org:80/ HTTP/1.0\r\n\r\n":                               "b.example.org",
		"GET http://b.example.org/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":           "its target is at b.example.org, and its Host field says a.example.org",
		"GET b.example.org HTTP/1.1\r\nHost: b.example.org\r\n\r\n":                   "invalid URI",
		"GET\t/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                              "invalid method",
		"GET /100%?to=http://b.example.org/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n":  "a.example.org",
		"CONNECT b.example.org:443 HTTP/1.1\r\nHost: B.example.org:443\r\n\r\n":       "b.example.org",
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n":                                   "EOF",
		"VERSION-CONTROL / HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                   "a.example.org",
		"GET":                              "EOF",
		"GET / HTTP/1.1\r\n\r\n":           errNoName.Error(),
		"GET / HTTP/1.1\r\nHost: \r\n\r\n": errNoName.Error(),
		"GET / HTTP/1.1\r\nHost: a.example.org\r\nhost: b.example.org\r\n\r\n": "too many Host headers",
		"GET / HTTP/1.1\r\nX: y\r\n Host: a.example.org\r\n\r\n":               errNoName.Error(),
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n":                                     "HTTP/2 without TLS",
		"SSH-2.0-OpenSSH_9.2p1\r\n":                                            "neither TLS nor HTTP/1",
		"GET / HTTP/3\r\n\r\n":                                                 "malformed HTTP version",
		"GET /\r\n\r\n":                                                        "neither TLS nor HTTP/1",
		"\x00\x00\x00\x01":                                                     "neither TLS nor HTTP/1",
		"get / HTTP/1.1\r\n":                                                   "EOF",
		"{\"a\": 1":                                                            "neither TLS nor HTTP/1",
		"GET http://user@b.example.org/ HTTP/1.1\r\nHost: b.example.org\r\n\r\n":         "b.example.org",
		"OPTIONS * HTTP/1.1\r\nHost: a.example.org\r\n\r\n":                              "a.example.org",
		"GET http://b.example.org?x HTTP/1.1\r\nHost: b.example.org\r\nA: b\r\n\r\nmore": "b.example.org",
	} {
		for _, size := range []int{1, 1 << 20} {
			name, err := begin(strings.NewReader(request), size).name()
			got := name
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, want) {
				t.Errorf("%q: %q, want %q", request, got, want)
			}
		}
	}
}

// FuzzHTTP checks that a request has a name or an error, and that no byte of it is lost.
func FuzzHTTP(f *testing.F) {
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n", "GET http://b.example.org:80/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n",
		"CONNECT b.example.org:443 HTTP/1.1\r\nHost: a.example.org\r\n\r\n",
	} {
		f.Add([]byte(request))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		b := begin(bytes.NewReader(input), 100)
		if name, err := b.name(); err == nil && name == "" {
			t.Error("an empty name without an error")
		}
		if rest, err := io.ReadAll(b.from); err != nil || !bytes.Equal(append(bytes.Clone(b.read), rest...), input) {
			t.Error("what was read and what follows is not what was sent")
		}
	})
}
