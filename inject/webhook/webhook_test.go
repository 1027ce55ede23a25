package webhook_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"

	"github.com/nametap/nametap/inject/webhook"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Together()
	m.Run()
}

// A server is a webhook that is served.
type server struct {
	*webhook.Webhook
	t      *testing.T
	url    string
	client *http.Client
	log    *testlog.Buffer
	file   string
	stop   func()
	ended  chan error
}

// serve serves a webhook with settings over TLS.
func serve(t *testing.T, settings string) *server {
	t.Helper()
	s := &server{t: t, log: testlog.New(t), file: filepath.Join(t.TempDir(), "inject.yaml"), ended: make(chan error, 1)}
	s.set(settings)
	s.Webhook = webhook.New(webhook.Config{File: s.file, Logger: s.log.Logger()})
	certified := httptest.NewTLSServer(nil) // for its certificate
	defer certified.Close()
	s.client = certified.Client()
	transport := s.client.Transport.(*http.Transport)
	transport.ForceAttemptHTTP2, transport.ExpectContinueTimeout = false, time.Minute
	t.Cleanup(transport.CloseIdleConnections)
	var lc net.ListenConfig
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.url = "https://" + ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() {
		s.ended <- s.Serve(ctx, ln, func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &certified.TLS.Certificates[0], nil })
		close(s.ended)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-s.ended; err != nil {
			t.Error(err)
		}
	})
	return s
}

// set replaces the file of settings.
func (s *server) set(text string) {
	s.t.Helper()
	if err := errors.Join(os.WriteFile(s.file+".new", []byte(text), 0o600), os.Rename(s.file+".new", s.file)); err != nil {
		s.t.Fatal(err)
	}
}

// A reply is what a request got.
type reply struct {
	status int
	closed bool // the connection
	text   string
}

// post sends a body and returns the answer.
func (s *server) post(path string, body io.Reader) (reply, error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodPost, s.url+path, body)
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
	response, err := s.client.Get(s.url + webhook.PathPod)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed || response.Header.Get("Allow") != http.MethodPost {
		t.Errorf("GET: %d", response.StatusCode)
	}
}

// TestSlow sends as many questions as are read at a time, and never their ends. They are given up, and the
// next one gets its answer.
func TestSlow(t *testing.T) { // I10
	t.Parallel()
	s := serve(t, "")
	begun, release, ended := make(chan struct{}, 4), make(chan struct{}), sync.WaitGroup{}
	for range cap(begun) {
		ended.Go(func() {
			body := readerFunc(func() {
				begun <- struct{}{}
				<-release
			})
			if got, err := s.post(webhook.PathPod, body); err == nil && got.status == http.StatusOK {
				t.Errorf("%+v", got)
			}
		})
	}
	for range cap(begun) {
		<-begun
	}
	if got, err := s.post(webhook.PathPod, strings.NewReader(question("pods", "CREATE", pod))); err != nil || got.status != http.StatusOK {
		t.Errorf("%v %+v", err, got)
	}
	wait.Until(t, "the others are given up", func() bool { return s.counted("invalid") == 4 })
	close(release)
	ended.Wait()
}

// TestSettings replaces the file with the settings. One that is wrong is not used.
func TestSettings(t *testing.T) { // I7
	t.Parallel()
	s := serve(t, "image: first:1\n")
	has := func(image string) func() bool {
		return func() bool { return strings.Contains(string(s.ask(webhook.PathNamespace, pod).Patch), image) }
	}
	failing := func(want float64) bool { return testutil.ToFloat64(s.Metrics()[2]) == want }
	if !has("first:1")() || !failing(0) {
		t.Error("the settings are not in use")
	}
	s.set("image: [\n")
	wait.Until(t, "the error is logged", func() bool { return failing(1) && s.log.Count("level=ERROR", s.file, "--inject-config") == 1 })
	if !has("first:1")() {
		t.Error("the previous settings are not in use")
	}
	s.set("image: second:1\n")
	wait.Until(t, "the settings are in use", has("second:1"))
	if !failing(0) {
		t.Error("the metric does not show the end of the error")
	}
	if err := os.Remove(s.file); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, "the missing file is logged", func() bool { return failing(1) && s.log.Count("level=ERROR", "no such file") == 1 })
	if !has("second:1")() {
		t.Error("the previous settings are not in use")
	}
}

// TestBadSettings starts with a file that cannot be used. Pods that should have the agent are refused with the
// reason, others are created, and a file that can be used is taken.
func TestBadSettings(t *testing.T) { // I7, I9
	t.Parallel()
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
		wait.Until(t, "the settings are in use", func() bool { return strings.Contains(string(s.ask(webhook.PathNamespace, pod).Patch), "good:1") })
		if failing := testutil.ToFloat64(s.Metrics()[2]); failing != 0 {
			t.Errorf("the metric is %v", failing)
		}
	}
}

// TestDrain stops the webhook while questions come: each is answered, and connections end with an answer
// once it drains.
func TestDrain(t *testing.T) { // I7
	t.Parallel()
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
	hook := webhook.New(webhook.Config{})
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
