package webhook_test

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/nametap/nametap/inject/webhook"
)

// reviewWith returns a question of 1 MiB about a pod: an opening and an end with many equal items between.
func reviewWith(opening, item, end string) []byte {
	const head, tail = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","namespace":"shop","operation":"CREATE","resource":{"group":"","version":"v1","resource":"pods"},`, `}}`
	n := (1<<20 - len(head) - len(opening) - len(end) - len(tail)) / len(item)
	return []byte(head + opening + strings.TrimSuffix(strings.Repeat(item, n), ",") + end + tail)
}

// TestFieldsCost checks how much memory is allocated for questions of 1 MiB with many small values, and for
// objects that become longer. The longest are of 4 MiB, and half of the memory of the container is 256 MiB.
func TestFieldsCost(t *testing.T) { // I10
	hook := webhook.New(webhook.Config{})
	for name, test := range map[string]struct {
		body  []byte
		limit uint64 // in MiB
		want  string
	}{
		"the object before":  {reviewWith(`"object":`+pod+`,"oldObject":[`, "1,", "]"), 2, `"allowed":true`},
		"options":            {reviewWith(`"object":`+pod+`,"options":{"a":[`, "[],", "]}"), 2, `"allowed":true`},
		"groups":             {reviewWith(`"object":`+pod+`,"userInfo":{"groups":[`, `"",`, "]}"), 2, `"allowed":true`},
		"extra":              {reviewWith(`"object":`+pod+`,"userInfo":{"extra":{"a":[`, `"",`, "]}}"), 2, `"allowed":true`},
		"unknown":            {reviewWith(`"object":`+pod+`,"x":[`, "{},", "]"), 2, `"allowed":true`},
		"labels":             {reviewWith(`"object":{"metadata":{"labels":{`, `"a":"",`, "}}}"), 12, "at most 20000 values"},
		"an annotation of <": {reviewWith(`"object":{"metadata":{"annotations":{"a":"`, "<", `"},"labels":{"nametap.dev/inject":"true"}},"spec":{"containers":[{"name":"app"}]}}`), 30, `"patch":`},
		"a label of bytes":   {reviewWith(`"object":{"metadata":{"labels":{"nametap.dev/inject":"`, "\xff", `"}},"spec":{"containers":[{"name":"app"}]}}`), 2, "want an AdmissionReview in JSON, in UTF-8"},
		"a label of U+007F":  {reviewWith(`"object":{"metadata":{"labels":{"nametap.dev/inject":"`, "\x7f", `"}},"spec":{"containers":[{"name":"app"}]}}`), 10, `want \"true\" or \"false\"`},
		"a long name":        {reviewWith(`"object":`+pod+`,"name":"`, "a", `"`), 4, "at most 253 characters"},
		"a long number":      {reviewWith(`"object":`+pod+`,"name":`, "1", ``), 4, "want an AdmissionReview"},
	} {
		request := httptest.NewRequest(http.MethodPost, webhook.PathPod, bytes.NewReader(test.body))
		recorder := httptest.NewRecorder()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		hook.ServeHTTP(recorder, request)
		runtime.ReadMemStats(&after)
		allocated := (after.TotalAlloc - before.TotalAlloc) >> 20
		t.Logf("%s: %d MiB", name, allocated)
		if answer := recorder.Body.String(); allocated > test.limit || !strings.Contains(answer, test.want) {
			t.Errorf("%s: %d MiB, want at most %d: %d %.300s", name, allocated, test.limit, recorder.Code, answer)
		}
	}
}

// dial connects to the webhook, for a client that does what no HTTP client does.
func (s *server) dial() *tls.Conn {
	s.t.Helper()
	dialer := tls.Dialer{Config: s.client.Transport.(*http.Transport).TLSClientConfig}
	conn, err := dialer.DialContext(s.t.Context(), "tcp", strings.TrimPrefix(s.url, "https://"))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn.(*tls.Conn)
}

// TestSlowClients connects with many clients that send no question, or half of one. Others get answers all the
// same, to small questions and to large ones.
func TestSlowClients(t *testing.T) { // I10
	t.Parallel()
	const clients = 20
	large := strings.Replace(question("pods", "CREATE", pod), `"dryRun"`, `"x":"`+strings.Repeat(" ", 1<<20)+`","dryRun"`, 1)
	for name, send := range map[string]func(*tls.Conn){
		"no body":   func(conn *tls.Conn) { writeHead(t, conn, 4<<20) },
		"no length": func(conn *tls.Conn) { writeHead(t, conn, -1) },
		"half a body": func(conn *tls.Conn) {
			writeHead(t, conn, 4<<20)
			_, _ = io.WriteString(conn, strings.Repeat(" ", 64<<10)) // given up, perhaps
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, "")
			var sent sync.WaitGroup
			for range clients {
				conn := s.dial()
				sent.Go(func() { send(conn) })
			}
			for _, body := range []string{question("pods", "CREATE", pod), large} {
				if got, err := s.post(webhook.PathNamespace, strings.NewReader(body)); err != nil || got.status != http.StatusOK || !strings.Contains(got.text, `"patch":`) {
					t.Errorf("%d bytes: %v %d %.200s", len(body), err, got.status, got.text)
				}
			}
			sent.Wait()
		})
	}
}

// writeHead sends the head of a request with a body of a length, -1 for chunks.
func writeHead(t *testing.T, conn net.Conn, length int) {
	t.Helper()
	coding := fmt.Sprintf("Content-Length: %d", length)
	if length < 0 {
		coding = "Transfer-Encoding: chunked"
	}
	if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: webhook\r\n%s\r\n\r\n", webhook.PathNamespace, coding); err != nil {
		t.Error(err)
	}
}
