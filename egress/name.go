package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

const (
	// maxHello is how many bytes at the start of a connection are read for a name: the length of the longest
	// handshake message that crypto/tls accepts. HTTP has the same limit.
	maxHello = 64 << 10
	// maxFraming is how many bytes are read beyond maxHello, to allow for the headers of TLS records. It is enough
	// for a ClientHello in some 3,000 records.
	maxFraming = 16 << 10
	// helloTimeout is how long a client may take to say the name of a host behind a wildcard.
	helloTimeout = 5 * time.Second
	// firstRead is the length in bytes up to which a beginning (the bytes that were read for a name) does not count
	// towards maxBeginnings. Most ClientHellos are shorter, even with post-quantum key shares.
	firstRead = 2 << 10
	// maxBeginnings bounds the memory in bytes for beginnings that are longer than firstRead, of all connections
	// together. It is enough for some 1,000 beginnings of 8 KiB. Each byte counts parserShare times, because the
	// parser holds up to three copies of what was read.
	maxBeginnings = 32 << 20
	parserShare   = 4
	// firstRecord to lastRecord are the first bytes of the records of TLS (RFC 8446, section 5.1). A ClientHello is one with
	// 22, but servers pass over some that come before it, such as warnings.
	firstRecord, lastRecord = 20, 23
)

// Errors of [beginning.name].
var (
	// errNoName is the error if the client sent no name.
	errNoName = errors.New("the client sent no name")
	// errOther is the error if the first bytes are of another protocol.
	errOther = errors.New("the first bytes are neither TLS nor HTTP/1")
	// errTooLong is the error if a beginning is as long as it may be and has no name.
	errTooLong = refuse(ReasonProtocol, "no name within %d bytes", maxHello)
	// errMemory is the error if beginnings use all of maxBeginnings.
	errMemory = refuse(ReasonLimit, "no name yet, and other clients use all memory for longer beginnings")
	// errStop ends a handshake once crypto/tls has parsed the ClientHello.
	errStop = errors.New("the name is known")
)

// A beginning is the start of a client's connection, from which a parser reads a name. The beginning keeps the
// bytes for the host, and discards what the parser writes. Beyond firstRead bytes, its parser runs only while it has locked
// parsing, which all beginnings share, but not while it waits for the client. So clients with long beginnings take one
// processor together, and none of them waits for another client.
type beginning struct {
	net.Conn // nil: crypto/tls calls only the methods below

	from    io.Reader
	hold    func(bytes int64) bool // reserves memory, or releases it; false if there is no more
	held    int64                  // bytes of memory that are reserved
	parsing *sync.Mutex
	locked  bool // parsing is locked
	rested  int  // length of read at the last rest
	read    []byte
	next    int   // index in read of the byte that the parser gets next
	err     error // why there are no more bytes
}

// Read gives the parser the bytes of the connection.
func (b *beginning) Read(p []byte) (int, error) {
	if b.next == len(b.read) && b.err == nil {
		b.readMore(min(len(p), firstRead))
	}
	n := copy(p, b.read[b.next:])
	if b.next += n; n > 0 {
		return n, nil
	}
	return 0, b.err
}

// readMore reads up to n bytes from the connection.
func (b *beginning) readMore(n int) {
	if len(b.read) > maxHello+maxFraming {
		b.err = errTooLong
		return
	}
	if more := int64(n * parserShare); len(b.read)+n > firstRead {
		b.held += more
		if !b.hold(more) {
			b.err = errMemory
			return
		}
	}
	b.read = slices.Grow(b.read, n)
	if b.locked {
		b.parsing.Unlock()
		if len(b.read) >= b.rested+firstRead {
			b.rested = len(b.read)
			time.Sleep(rest) // Go then looks at the network
		}
	}
	got, err := b.from.Read(b.read[len(b.read) : len(b.read)+n])
	b.read, b.err = b.read[:len(b.read)+got], err
	if b.locked = len(b.read) > firstRead; b.locked {
		b.parsing.Lock()
	}
}

// release gives back the reserved memory, once the bytes are no longer needed.
func (b *beginning) release() { b.hold(-b.held) }

// Write discards the alerts of crypto/tls.
func (*beginning) Write(p []byte) (int, error) { return len(p), nil }

// Close leaves the connection open.
func (*beginning) Close() error { return nil }

// name returns the name for which the client asks: the server name of a ClientHello (SNI), or the host of an HTTP/1
// request, without the port. It reads no more than it needs. The error is errNoName if the client says no name, and
// another error if the beginning is malformed or could not be read.
func (b *beginning) name() (string, error) {
	defer func() {
		if b.locked {
			b.parsing.Unlock()
		}
	}()
	if _, b.err = io.ReadFull(b, make([]byte, 1)); b.err != nil {
		return "", b.err
	}
	b.next = 0
	name, err := "", error(nil)
	if first := b.read[0]; firstRecord <= first && first <= lastRecord {
		name, err = helloName(b)
	} else if err = b.awaitHTTP(); err == nil {
		name, err = httpName(b)
	}
	switch {
	case errors.Is(err, errOther):
	case err != nil && b.err != nil:
		err = b.err
	case err == nil && name == "":
		err = errNoName
	}
	return name, err
}

// awaitHTTP reads until the first line that is not empty shows that it begins a request of HTTP. As servers do, it takes any
// white space for a separator. Its error is errOther as soon as a byte cannot be a part of a method, or the line ends without
// a version.
func (b *beginning) awaitHTTP() error {
	const before, within, after = 0, 1, 2 // before the method, and so on
	for at, state := 0, before; ; at++ {
		for at == len(b.read) && b.err == nil {
			b.readMore(firstRead)
		}
		switch {
		case at < len(b.read):
		case errors.Is(b.err, io.EOF):
			return fmt.Errorf("%w: %w", errOther, b.err)
		default:
			return b.err
		}
		switch c := b.read[at]; {
		case c == '\n' && state != before:
			if !bytes.Contains(bytes.ToUpper(b.read[:at]), []byte("HTTP/")) {
				return errOther
			}
			return nil
		case state == before && strings.IndexByte(" \t\v\f\r\n", c) >= 0:
		case state == within && strings.IndexByte(" \t\v\f\r", c) >= 0:
			state = after
		case state == after:
		case 'A' <= c && c <= 'Z', 'a' <= c && c <= 'z', '0' <= c && c <= '9' && state == within, strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
			state = within // RFC 9110, section 5.6.2
		default:
			return errOther
		}
	}
}

// helloName returns the server name of a ClientHello, as crypto/tls parses it. If the ClientHello is encrypted,
// helloName returns the outer name.
func helloName(b *beginning) (string, error) {
	name := ""
	server := tls.Server(b, &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		name = hello.ServerName
		return nil, errStop
	}})
	if err := server.HandshakeContext(context.Background()); !errors.Is(err, errStop) {
		return "", err
	}
	return name, nil
}

// httpName returns the host of an HTTP/1 request: the host in the Host field, and in the target if that has one (RFC 9112,
// section 3.2). Servers differ in which of them counts, so both must be the same. A path, such as /100%, is for the host.
func httpName(b *beginning) (string, error) {
	reader := bufio.NewReaderSize(b, firstRead)
	line, _ := reader.ReadString('\n') // after an error, ReadRequest has it, too
	method, rest, _ := strings.Cut(line, " ")
	target, version, _ := strings.Cut(rest, " ")
	request, err := http.ReadRequest(bufio.NewReader(io.MultiReader(strings.NewReader(method+" / "+version), reader)))
	switch {
	case err != nil:
		return "", err
	case request.ProtoMajor != 1:
		return "", errors.New("HTTP/2 without TLS, in which the host cannot be read") // HTTP/2 compresses the host
	}
	host := (&url.URL{Host: request.Host}).Hostname()
	switch {
	case strings.HasPrefix(target, "/"), target == "*":
		return host, nil
	case method == http.MethodConnect:
		target = "http://" + target
	}
	to, err := url.ParseRequestURI(target)
	if err == nil && host != "" && !strings.EqualFold(host, to.Hostname()) {
		err = fmt.Errorf("its target is at %s, and its Host field says %s", to.Hostname(), host)
	}
	if err != nil {
		return "", err
	}
	return to.Hostname(), nil
}

// readName reads the beginning of a connection until it has a name. It returns the name, or a refusal if no host
// of the route has it. If the VIP has told the name, the client need not say one.
func (b *beginning) readName(r *route) (wire.Name, error) {
	text, err := b.name()
	switch _, exact := r.exact(); {
	case err == nil:
		return r.check(text)
	case exact && (errors.Is(err, errNoName) || errors.Is(err, errOther)):
		return wire.Root, nil
	}
	return wire.Root, b.refusal(r, err)
}

// refusal returns the refusal for an error of the method name.
func (b *beginning) refusal(r *route, err error) error {
	known, refused := errors.AsType[*refusal](err)
	switch n := len(b.read); {
	case refused:
		err = refuse(known.reason, "%s: %w", r.text(), err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = refuse(ReasonSlow, "%s: no name within %v, %d bytes read", r.text(), helloTimeout, n)
	case errors.Is(err, io.EOF):
		err = refuse(ReasonClosed, "%s: the client ended its data after %d bytes, before it said a name", r.text(), n)
	case b.err != nil:
		err = refuse(ReasonClosed, "%s: reading a name: %w", r.text(), err)
	case errors.Is(err, errNoName):
		err = refuse(ReasonNoName, "%s needs a name, by SNI or the Host field: %w", r.text(), err)
	default:
		err = refuse(ReasonProtocol, "%s needs TLS or HTTP/1: %.300s", r.text(), err) // err may quote all that was read
	}
	return err
}
