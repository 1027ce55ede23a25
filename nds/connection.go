package nds

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/clock"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
)

const (
	// The pause before the next connect is random, from 0 to a limit. The limit is minPause after the first failure
	// and after a stream that worked. It doubles with each further failure, up to maxPause.
	minPause = 100 * time.Millisecond
	maxPause = 30 * time.Second

	// dialTimeout bounds the lookup and the TCP connect, and openTimeout what follows until the stream is open. A server
	// that permits no stream (SETTINGS_MAX_CONCURRENT_STREAMS of 0) does not refuse the stream: it would wait.
	dialTimeout = 10 * time.Second
	openTimeout = 10 * time.Second

	// If a peer vanishes without closing the connection, the client notices that after pingAfter plus pingTimeout.
	// istiod answers "too_many_pings" to more than one ping in 15 s.
	pingAfter   = 20 * time.Second
	pingTimeout = 10 * time.Second

	// window is how many bytes the control plane may send before the client has read them. Without a fixed window,
	// gRPC would measure the bandwidth with a PING for each push, and answering the PING costs the control plane as
	// much as the push.
	window = 1 << 20

	// maxHeaders bounds the headers and trailers that the control plane sends; an error is one of them.
	maxHeaders = 1 << 20

	// maxPingAfter is a little more than 5 minutes: by default, every gRPC server permits one ping in 5 minutes.
	maxPingAfter = 6 * time.Minute
)

// pause returns the pause before the next connect: the limit of the pause, multiplied by part. The caller chooses
// part at random from 0 to 1 (full jitter). failures is the number of failures in a row before the last failure, so
// it is 0 after the first failure.
func pause(failures int, part float64) time.Duration {
	return time.Duration(part * float64(clock.BackOff(failures, minPause, maxPause)))
}

// A connection is the one connection of an attempt to reach a server.
type connection struct {
	*grpc.ClientConn
	transport net.Conn
	dials     atomic.Int32 // how often gRPC has connected, or wanted to
}

// dial is the dialer of gRPC. It returns the transport once.
func (c *connection) dial(context.Context, string) (net.Conn, error) {
	if c.dials.Add(1) > 1 {
		return nil, errEnded
	}
	return c.transport, nil
}

// explain returns why an RPC ended with err. After GOAWAY, gRPC's error depends on how far the RPC was.
func (c *connection) explain(err error) error {
	if c.dials.Load() > 1 || strings.Contains(err.Error(), "is draining") {
		return errEnded
	}
	return err
}

// close ends the connection, also if gRPC has not used it.
func (c *connection) close() {
	_ = c.Close()
	_ = c.transport.Close()
}

// errEnded is the error if the server ends the connection of an attempt before it has opened a stream, as servers do
// that drain. gRPC would connect again at once, any number of times.
var errEnded = errors.New("the server ended the connection before it opened a stream (GOAWAY): it drains, or permits no connection for long")

// dial connects to addr. Each attempt to connect calls dial, because the address may have changed, and so may the files
// with the credentials.
func dial(ctx context.Context, cfg Config, addr string, options ...grpc.DialOption) (*connection, error) {
	dialing, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	transport, err := dialer(cfg)(dialing, addr)
	if err != nil {
		return nil, err
	}
	c := &connection{transport: transport}
	options = append([]grpc.DialOption{
		// The control plane is inside the mesh; HTTPS_PROXY is for servers outside.
		grpc.WithNoProxy(),
		// Pushes are rare, so no buffer is kept for the next push. The default pool
		// would keep 3 MB after a push of 10,000 hosts.
		experimental.WithBufferPool(mem.NopBufferPool{}),
		grpc.WithDisableServiceConfig(),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithContextDialer(c.dial),
		// Without a buffer for retries, a stream that the server refuses after the first message has failed.
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPushBytes), grpc.MaxRetryRPCBufferSize(0)),
		grpc.WithStaticStreamWindowSize(window),
		grpc.WithStaticConnWindowSize(window),
	}, options...)
	// "passthrough" means that gRPC does not look up the host.
	c.ClientConn, err = grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		_ = transport.Close()
		return nil, fmt.Errorf("preparing the connection to %q: %w", addr, err)
	}
	return c, nil
}

// dialer returns cfg.Dial, or its default.
func dialer(cfg Config) func(ctx context.Context, addr string) (net.Conn, error) {
	if cfg.Dial != nil {
		return cfg.Dial
	}
	// TCP notices a dead host within 25 s, even where HTTP/2 pings are not permitted.
	dialer := net.Dialer{Resolver: cfg.Resolver, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}
	return func(ctx context.Context, addr string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", addr) }
}

// connectionCredentials are the credentials of one connection.
type connectionCredentials struct {
	options []grpc.DialOption
	// workload is the workload certificate if the connection uses it, otherwise nil.
	workload *tls.Certificate
	// outdated is not nil if the dates of the client certificate or the token, whichever the server checks, say that the
	// server refuses it. This is certain. The error of the connection is not: a server that refuses a certificate sends
	// an alert and closes the connection, so the client reads the alert, or fails to write.
	outdated error
}

// readCredentials reads the files that cfg names. It is called for every connection: if a file is replaced, the
// next connection uses the new file. workload may be nil. If there is a client certificate or a workload
// certificate, the token may be missing or expired.
func readCredentials(cfg Config, workload *tls.Certificate, serverName string) (connectionCredentials, error) {
	var creds connectionCredentials
	if cfg.Plaintext {
		creds.options = append(creds.options, grpc.WithTransportCredentials(insecure.NewCredentials()))
		return creds, nil
	}
	tlsConfig := &tls.Config{ServerName: serverName, MinVersion: tls.VersionTLS12}
	var err error
	if tlsConfig.RootCAs, err = readRoots(cfg.RootCA, cfg.RootCAFallback); err != nil {
		return creds, fileError{"root certificates (XDS_ROOT_CA, --xds-root-ca)", err}
	}
	certificate := workload
	if cfg.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
		if err != nil {
			return creds, fileError{"the client certificate (--xds-cert, --xds-key)", err}
		}
		certificate = &pair
		creds.outdated = checkDates("the client certificate in "+cfg.CertFile+" (--xds-cert)", pair.Leaf.NotBefore, pair.Leaf.NotAfter)
	} else {
		creds.workload = workload
	}
	if certificate != nil {
		// Unlike tls.Config.Certificates, GetClientCertificate sends the certificate even if the server does not
		// list the issuer. A server that does not accept the certificate then says so by an alert.
		tlsConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return certificate, nil
		}
	}
	creds.options = append(creds.options, grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig)))
	if cfg.TokenFile == "" {
		return creds, nil
	}
	token, err := readToken(cfg)
	if certificate != nil && (err != nil || checkToken(cfg, token) != nil) {
		// A server that checks the token first would refuse an expired token.
		return creds, nil //nolint:nilerr // the certificate is enough
	}
	if err != nil {
		return creds, fileError{"the token (--xds-token-file)", err}
	}
	if certificate == nil {
		creds.outdated = checkToken(cfg, token)
	}
	header := bearer{"authorization": "Bearer " + token}
	if cfg.Node.ClusterID != defaultClusterID {
		// With this header, the API server of that cluster checks the token for istiod. Without the header, the API
		// server of istiod's own cluster checks it. istiod refuses a cluster that it does not know, so the default
		// name, which may be wrong, is not sent.
		header["clusterid"] = cfg.Node.ClusterID
	}
	creds.options = append(creds.options, grpc.WithPerRPCCredentials(header))
	return creds, nil
}

// readRoots returns the certificates in file, which is PEM. If file does not exist, it reads
// fallback, unless fallback is "". If file is "", it returns nil, which means the system's root
// certificates. It returns an error if all certificates have expired, or are not valid yet.
func readRoots(file, fallback string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil //nolint:nilnil // documented
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && fallback != "" {
		// If neither file exists, the error is about file, which the user knows.
		if found, fallbackErr := os.ReadFile(fallback); !errors.Is(fallbackErr, fs.ErrNotExist) {
			file, text, err = fallback, found, fallbackErr
		}
	}
	if err != nil {
		return nil, err
	}
	pool, outdated := x509.NewCertPool(), fmt.Errorf("no certificate in %q, want PEM", file)
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if root, err := x509.ParseCertificate(block.Bytes); err == nil {
			pool.AddCert(root)
			if outdated != nil {
				outdated = checkDates("the last root certificate in "+file, root.NotBefore, root.NotAfter)
			}
		}
	}
	return pool, outdated
}

// checkDates returns an error if the time is not between two dates, which may be zero. what describes the certificate or
// the token that has these dates.
func checkDates(what string, notBefore, notAfter time.Time) error {
	switch now := time.Now(); {
	case now.Before(notBefore):
		return fmt.Errorf("%s is not valid before %s: check the clock of this host, or put another one there", what, notBefore.UTC().Format(time.RFC3339))
	case !notAfter.IsZero() && now.After(notAfter):
		return fmt.Errorf("%s has expired at %s: put a new one there, or check the clock of this host", what, notAfter.UTC().Format(time.RFC3339))
	}
	return nil
}
