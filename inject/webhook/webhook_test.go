package webhook_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"

	"github.com/nametap/nametap/inject/webhook"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Prepare()
	m.Run()
}

// A server is a webhook that is served, in the bubble of a test: its times are virtual, so no slow machine exceeds them.
type server struct {
	*webhook.Webhook
	t       *testing.T
	network *network
	client  *http.Client
	log     *testlog.Buffer
	file    string
	stop    func()
	ended   chan error
}

// A network connects clients and a server in memory.
type network struct {
	conns  chan net.Conn
	closed chan struct{}
}

// conn is a connection from this host.
type conn struct{ net.Conn }

// RemoteAddr returns the address of the client.
func (conn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// Accept returns the next connection.
func (n *network) Accept() (net.Conn, error) {
	select {
	case c := <-n.conns:
		return c, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (n *network) Close() error {
	close(n.closed)
	return nil
}

// Addr returns no address.
func (*network) Addr() net.Addr { return new(net.TCPAddr) }

// dial connects a client.
func (n *network) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case n.conns <- conn{server}:
		return client, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}

// host is the name of the server.
const host = "webhook.test"

// serve serves a webhook with settings over TLS.
func serve(t *testing.T, settings string) *server {
	t.Helper()
	s := &server{
		t: t, network: &network{make(chan net.Conn), make(chan struct{})}, log: testlog.New(t), file: filepath.Join(t.TempDir(), "inject.yaml"),
		ended: make(chan error, 1),
	}
	s.set(settings)
	s.Webhook = webhook.New(webhook.Config{File: s.file, Logger: s.log.Logger()})
	authority := fakexds.NewAuthority(t, host, "unused")
	chain, key := authority.Server()
	certificate, err := tls.X509KeyPair([]byte(chain), []byte(key))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(authority.Root()))
	transport := &http.Transport{
		DialContext: s.network.dial, TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: host, MinVersion: tls.VersionTLS12},
		ExpectContinueTimeout: time.Minute,
	}
	s.client = &http.Client{Transport: transport}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() {
		s.ended <- s.Serve(ctx, s.network, func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &certificate, nil })
		close(s.ended)
	}()
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		cancel()
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
	})
	return s
}

// set replaces the file of settings, which a server has then read.
func (s *server) set(text string) {
	s.t.Helper()
	if err := errors.Join(os.WriteFile(s.file+".new", []byte(text), 0o600), os.Rename(s.file+".new", s.file)); err != nil {
		s.t.Fatal(err)
	}
	pass()
}

// pass lets the time pass until the server has read its files again.
func pass() {
	time.Sleep(2 * time.Second) //nolint:forbidigo // of the bubble's clock
	synctest.Wait()
}

// A reply is what a request got.
type reply struct {
	status int
	closed bool // the connection
	text   string
}

// post sends a body and returns the answer.
func (s *server) post(path string, body io.Reader) (reply, error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodPost, "https://"+host+path, body)
	if err != nil {
		return reply{}, err
	}
	request.Header.Set("Expect", "100-continue")
	response, err := s.client.Do(request)
	if err != nil {
		return reply{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return reply{response.StatusCode, response.Close, string(text)}, err
}

// ask sends the question about a pod and returns the response.
func (s *server) ask(path, object string) *admissionv1.AdmissionResponse {
	s.t.Helper()
	got, err := s.post(path, strings.NewReader(question("pods", "CREATE", object)))
	if err != nil || got.status != http.StatusOK {
		s.t.Fatalf("%v %+v", err, got)
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal([]byte(got.text), &review); err != nil || review.Response.UID != "u" || review.APIVersion != "admission.k8s.io/v1" {
		s.t.Fatalf("%v: %s", err, got.text)
	}
	return review.Response
}

// question returns an AdmissionReview.
func question(resource, operation, object string) string {
	return fmt.Sprintf(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","dryRun":true,"namespace":"shop","operation":%q,"resource":{"group":"","version":"v1","resource":%q},"object":%s}}`, operation, resource, object)
}

// pod is the pod of most tests.
const pod = `{"metadata":{"name":"app"},"spec":{"containers":[{"name":"app","image":"app"}]}}`

// counted returns how many requests had an outcome.
func (s *server) counted(outcome string) float64 {
	s.t.Helper()
	return testutil.ToFloat64(s.Metrics()[0].(*prometheus.CounterVec).WithLabelValues(outcome))
}

// TestOutcomes asks about pods that are injected, skipped and refused.
func TestOutcomes(t *testing.T) { // I1, I3
	t.Parallel()
	synctest.Test(t, testOutcomes)
}

func testOutcomes(t *testing.T) {
	s := serve(t, "image: mine:1\n")
	injected := s.ask(webhook.PathNamespace, pod)
	if !injected.Allowed || !strings.Contains(string(injected.Patch), "mine:1") || *injected.PatchType != admissionv1.PatchTypeJSONPatch || injected.AuditAnnotations["outcome"] != "injected" {
		t.Errorf("%+v", injected)
	}
	if skipped := s.ask(webhook.PathPod, pod); !skipped.Allowed || skipped.Patch != nil || skipped.PatchType != nil || !strings.Contains(skipped.AuditAnnotations["reason"], "neither the pod nor its namespace") {
		t.Errorf("%+v", skipped)
	}
	if refused := s.ask(webhook.PathPod, `{"metadata":{"labels":{"nametap.dev/inject":"yes"}},"spec":{"containers":[{"name":"app"}]}}`); refused.Allowed || refused.Result.Code != http.StatusForbidden || !strings.Contains(refused.Result.Message, `"yes", want "true" or "false"`) {
		t.Errorf("%+v", refused)
	}
	if invalid := s.ask(webhook.PathNamespace, `{}`); invalid.Allowed || !strings.Contains(invalid.Result.Message, "not a valid pod") {
		t.Errorf("%+v", invalid)
	}
	for _, outcome := range []string{"injected", "skipped", "refused", "invalid"} {
		if n := s.counted(outcome); n != 1 {
			t.Errorf("%s: %v", outcome, n)
		}
	}
}

// TestRequests sends what the API server would not send.
func TestRequests(t *testing.T) { // I10
	t.Parallel()
	synctest.Test(t, testRequests)
}

func testRequests(t *testing.T) {
	s := serve(t, "")
	chunked := func(text string) io.Reader { return io.MultiReader(strings.NewReader(text)) } // of unknown length
	for name, test := range map[string]struct {
		path   string
		body   io.Reader
		status int
		want   string
	}{
		"10 MB":           {webhook.PathPod, bytes.NewReader(make([]byte, 10<<20)), http.StatusRequestEntityTooLarge, "at most 4 MiB"},
		"10 MB in chunks": {webhook.PathPod, chunked(strings.Repeat(" ", 10<<20)), http.StatusRequestEntityTooLarge, "at most 4 MiB"},
		"malformed":       {webhook.PathPod, strings.NewReader(`{`), http.StatusBadRequest, "want an AdmissionReview in JSON"},
		"empty":           {webhook.PathPod, strings.NewReader(``), http.StatusBadRequest, "want an AdmissionReview in JSON"},
		"null":            {webhook.PathPod, strings.NewReader(`null`), http.StatusBadRequest, `got kind "" of ""`},
		"old version":     {webhook.PathPod, strings.NewReader(`{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview","request":{"uid":"u"}}`), http.StatusBadRequest, "v1beta1"},
		"no request":      {webhook.PathPod, strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`), http.StatusBadRequest, "with a request"},
		"other path":      {"/inject", strings.NewReader(``), http.StatusNotFound, "want /inject/namespace or /inject/pod"},
		"chunks":          {webhook.PathNamespace, chunked(question("pods", "CREATE", pod)), http.StatusOK, `"patch":`},
		"other resource":  {webhook.PathNamespace, strings.NewReader(question("services", "CREATE", `{}`)), http.StatusOK, `"warnings":["nametap changes pods`},
		"other operation": {webhook.PathNamespace, strings.NewReader(question("pods", "UPDATE", pod)), http.StatusOK, `"warnings":["nametap changes pods`},
		"long patch":      {webhook.PathNamespace, strings.NewReader(question("pods", "CREATE", strings.Replace(pod, `"name"`, `"annotations":{"a":"`+strings.Repeat("a", 3<<20)+`"},"name"`, 1))), http.StatusOK, "want one whose changes need at most 3 MiB"},
		"null object":     {webhook.PathNamespace, strings.NewReader(question("pods", "CREATE", "null")), http.StatusOK, "not a valid pod"},
	} {
		got, err := s.post(test.path, test.body)
		if err != nil || got.status != test.status || !strings.Contains(got.text, test.want) {
			t.Errorf("%s: %v %d %.300s", name, err, got.status, got.text)
		}
	}
	response, err := s.client.Get("https://" + host + webhook.PathPod)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Allow") != http.MethodPost {
		t.Errorf("GET: %d", response.StatusCode)
	}
}

// TestSettings replaces the file with the settings. One that is wrong is not used.
func TestSettings(t *testing.T) { // I7
	t.Parallel()
	synctest.Test(t, testSettings)
}

func testSettings(t *testing.T) {
	s := serve(t, "image: first:1\n")
	want := func(image string, failing float64, lines int, words ...string) {
		t.Helper()
		if patch := string(s.ask(webhook.PathNamespace, pod).Patch); !strings.Contains(patch, image) {
			t.Errorf("the settings with %s are not in use: %s", image, patch)
		}
		if got := testutil.ToFloat64(s.Metrics()[2]); got != failing {
			t.Errorf("the metric is %v, want %v", got, failing)
		}
		if n := s.log.Count(append(words, "level=ERROR")...); n != lines {
			t.Errorf("%d lines with %q, want %d", n, words, lines)
		}
	}
	want("first:1", 0, 0)
	s.set("image: [\n")
	want("first:1", 1, 1, s.file, "--inject-config")
	s.set("image: second:1\n")
	want("second:1", 0, 1)
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	pass()
	want("second:1", 1, 1, "no such file")
}

// TestBadSettings starts with a file that cannot be used. Pods that should have the agent are refused with the
// reason, others are created, and a file that can be used is taken.
func TestBadSettings(t *testing.T) { // I7, I9
	t.Parallel()
	synctest.Test(t, testBadSettings)
}

func testBadSettings(t *testing.T) {
	for text, want := range map[string]string{"mode: cni\n": `mode \"cni\"`, "mod: x\n": "mod", "a: [": "inject.yaml"} {
		s := serve(t, text)
		if failing := testutil.ToFloat64(s.Metrics()[2]); failing != 1 || s.log.Count("level=ERROR", s.file, want, "--inject-config", "there are no settings") != 1 {
			t.Errorf("%q: the metric is %v, or the log has no error", text, failing)
		}
		refused := s.ask(webhook.PathNamespace, pod)
		if refused.Allowed || refused.Patch != nil || !strings.Contains(refused.Result.Message, s.file) || !strings.Contains(refused.Result.Message, strings.ReplaceAll(want, `\`, "")) {
			t.Errorf("%q: %+v", text, refused)
		}
		if skipped := s.ask(webhook.PathPod, pod); !skipped.Allowed || skipped.Patch != nil {
			t.Errorf("%q: %+v", text, skipped)
		}
		s.set("image: good:1\n")
		if patch := string(s.ask(webhook.PathNamespace, pod).Patch); !strings.Contains(patch, "good:1") {
			t.Errorf("%q: the settings that can be used are not in use: %s", text, patch)
		}
		if failing := testutil.ToFloat64(s.Metrics()[2]); failing != 0 {
			t.Errorf("the metric is %v", failing)
		}
	}
}

// TestProxyMetadata injects a pod in a mesh whose config switches capture off.
func TestProxyMetadata(t *testing.T) { // I12
	t.Parallel()
	hook := webhook.New(webhook.Config{Logger: slog.New(slog.DiscardHandler), ProxyMetadata: func() map[string]string { return map[string]string{"ISTIO_META_DNS_CAPTURE": "false"} }})
	recorder := httptest.NewRecorder()
	hook.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, webhook.PathNamespace, strings.NewReader(question("pods", "CREATE", pod))))
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(recorder.Body.Bytes(), &review); err != nil || !strings.Contains(string(review.Response.Patch), `{"name":"ISTIO_META_DNS_CAPTURE","value":"false"}`) {
		t.Errorf("%v: %s", err, review.Response.Patch)
	}
}

// TestGuard asks about pods with a guard: one that its namespace has, and one that would get around it.
func TestGuard(t *testing.T) { // I21
	t.Parallel()
	namespace := func(context.Context, string) (labels, annotations map[string]string, err error) {
		return nil, map[string]string{"nametap.dev/guard": "sandbox"}, nil
	}
	hook := webhook.New(webhook.Config{Logger: slog.New(slog.DiscardHandler), Namespace: namespace})
	for object, want := range map[string]string{
		`{"spec":{"containers":[{"name":"app","securityContext":{"capabilities":{"drop":["ALL"]}}}]}}`: `{"configMap":{"items":[{"key":"policy.yaml","path":"policy.yaml"}],"name":"sandbox"},"name":"nametap-guard"}`,
		`{"spec":{"containers":[{"name":"app"}]}}`:                                                     `container \"app\" has the capabilities NET_RAW, SETGID, SETUID`,
	} {
		recorder := httptest.NewRecorder()
		hook.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, webhook.PathNamespace, strings.NewReader(question("pods", "CREATE", object))))
		var review admissionv1.AdmissionReview
		err := json.Unmarshal(recorder.Body.Bytes(), &review)
		if got := recorder.Body.String() + string(review.Response.Patch); err != nil || !strings.Contains(got, want) {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

// TestDrain stops the webhook while questions come: each is answered, and connections end with an answer
// once it drains.
func TestDrain(t *testing.T) { // I7
	t.Parallel()
	synctest.Test(t, testDrain)
}

func testDrain(t *testing.T) {
	s := serve(t, "")
	ask := func() io.Reader { return strings.NewReader(question("pods", "CREATE", pod)) }
	if got, err := s.post(webhook.PathPod, ask()); err != nil || got.closed {
		t.Fatalf("%v %+v: the connection is closed", err, got)
	}
	s.Drain()
	if got, err := s.post(webhook.PathPod, ask()); err != nil || !got.closed {
		t.Errorf("%v %+v: the connection stays open", err, got)
	}
	begun, release, answered := make(chan struct{}, 2), make(chan struct{}), sync.WaitGroup{}
	for range cap(begun) {
		answered.Go(func() {
			body := io.MultiReader(readerFunc(func() { // called when the webhook reads the question
				begun <- struct{}{}
				<-release
			}), ask())
			if got, err := s.post(webhook.PathNamespace, body); err != nil || got.status != http.StatusOK {
				t.Errorf("%v %+v", err, got)
			}
		})
	}
	for range cap(begun) {
		<-begun
	}
	s.stop()
	close(release)
	answered.Wait()
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
}

// A readerFunc is called once, and has no bytes.
type readerFunc func()

func (f readerFunc) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

// FuzzReview sends bodies: each gets an answer, and an injected pod stays one.
func FuzzReview(f *testing.F) { // I10
	f.Add([]byte(question("pods", "CREATE", pod)))
	f.Add([]byte(question("services", "CREATE", pod)))
	f.Add([]byte(question("pods", "CREATE", `{"spec":{"containers":[{"name":"istio-proxy","env":[{"name":"ISTIO_META_DNS_CAPTURE","value":"true"}]}]}}`)))
	f.Add([]byte(question("pods", "CREATE", `{"metadata":{"annotations":{"nametap.dev/status":"{\"mode\":\"resolv\"}"}},"spec":{"containers":[{"name":"a"}],"dnsConfig":{"nameservers":null}}}`)))
	f.Add([]byte(`null`))
	hook := webhook.New(webhook.Config{Logger: slog.New(slog.DiscardHandler)})
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, path := range []string{webhook.PathNamespace, webhook.PathPod} {
			recorder := httptest.NewRecorder()
			hook.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body)))
			switch recorder.Code {
			case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
				continue
			case http.StatusOK:
			default:
				t.Fatalf("status %d: %s", recorder.Code, recorder.Body)
			}
			var review admissionv1.AdmissionReview
			if err := json.Unmarshal(recorder.Body.Bytes(), &review); err != nil || review.Response == nil || !review.Response.Allowed && review.Response.Result.Message == "" {
				t.Fatalf("%v: %s", err, recorder.Body)
			}
			if patch := review.Response.Patch; patch != nil && !json.Valid(patch) {
				t.Fatalf("the patch is %s", patch)
			}
		}
	})
}
