package webhook_test

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/inject/webhook"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// reviewWith returns a question of 1 MiB about a pod: an opening and an end with many equal items between.
func reviewWith(opening, item, end string) []byte {
	const head, tail = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","namespace":"shop","operation":"CREATE","resource":{"group":"","version":"v1","resource":"pods"},`, `}}`
	n := (1<<20 - len(head) - len(opening) - len(end) - len(tail)) / len(item)
	return []byte(head + opening + strings.TrimSuffix(strings.Repeat(item, n), ",") + end + tail)
}

// TestCostlyFields checks the answers to questions of 1 MiB with many small values or a long one.
func TestCostlyFields(t *testing.T) { // I10
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hook := webhook.New(webhook.Config{Logger: slog.New(slog.DiscardHandler)})
		for name, test := range map[string]struct {
			body []byte
			want string
		}{
			"the object before":  {reviewWith(`"object":`+pod+`,"oldObject":[`, "1,", "]"), `"allowed":true`},
			"groups":             {reviewWith(`"object":`+pod+`,"userInfo":{"groups":[`, `"",`, "]}"), `"allowed":true`},
			"unknown":            {reviewWith(`"object":`+pod+`,"x":[`, "{},", "]"), `"allowed":true`},
			"labels":             {reviewWith(`"object":{"metadata":{"labels":{`, `"a":"",`, "}}}"), "brackets and commas: want at most 50000"},
			"an annotation of <": {reviewWith(`"object":{"metadata":{"annotations":{"a":"`, "<", `"},"labels":{"nametap.dev/inject":"true"}},"spec":{"containers":[{"name":"app"}]}}`), `"patch":`},
			"a label of bytes":   {reviewWith(`"object":{"metadata":{"labels":{"nametap.dev/inject":"`, "\xff", `"}},"spec":{"containers":[{"name":"app"}]}}`), "want an AdmissionReview in JSON, in UTF-8"},
			"a label of U+007F":  {reviewWith(`"object":{"metadata":{"labels":{"nametap.dev/inject":"`, "\x7f", `"}},"spec":{"containers":[{"name":"app"}]}}`), `want \"true\" or \"false\"`},
			"a long name":        {reviewWith(`"object":`+pod+`,"name":"`, "a", `"`), "at most 253 characters"},
			"a long number":      {reviewWith(`"object":`+pod+`,"name":`, "1", ``), "want an AdmissionReview"},
		} {
			recorder := httptest.NewRecorder()
			hook.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, webhook.PathPod, bytes.NewReader(test.body)))
			if answer := recorder.Body.String(); !strings.Contains(answer, test.want) {
				t.Errorf("%s: %.300s", name, answer)
			}
		}
	})
}

// dial connects to the webhook, for a client that does what no HTTP client does.
func (s *server) dial() *tls.Conn {
	s.t.Helper()
	raw, err := s.network.dial(s.t.Context(), "", "")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = raw.Close() })
	return tls.Client(raw, s.client.Transport.(*http.Transport).TLSClientConfig)
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
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, "")
				var sent sync.WaitGroup
				for range clients {
					conn := s.dial()
					sent.Go(func() { send(conn) })
				}
				synctest.Wait()
				for _, body := range []string{question("pods", "CREATE", pod), large} {
					if got, err := s.post(webhook.PathNamespace, strings.NewReader(body)); err != nil || got.status != http.StatusOK || !strings.Contains(got.text, `"patch":`) {
						t.Errorf("%d bytes: %v %d %.200s", len(body), err, got.status, got.text)
					}
				}
				sent.Wait()
				wait.Until(t, "the others are given up", func() bool { return s.counted("invalid") == clients })
			})
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
