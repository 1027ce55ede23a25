package agent_test

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/testkit/fakexds"
)

// TestTail checks that clients of the private socket read the queries, eight of them at a time, that to a ninth
// the oldest gives way, and that all others end with the agent. R13.
func TestTail(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	control.Push(generation(1))
	a := start(t, config(t, control.Addr()))
	a.await(t, true)
	open := func() *http.Response {
		t.Helper()
		resp, err := a.private.Get("http://" + a.StatusAddr() + "/debug/tail?type=TXT")
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	var tails []*http.Response
	for range 9 {
		tails = append(tails, open()) //nolint:bodyclose // below
	}
	if rest, err := io.ReadAll(tails[0].Body); err != nil || len(rest) > 0 {
		t.Errorf("the oldest client: %q, %v", rest, err)
	}
	if code, body := a.get(t, "/debug/tail?rcode=nope"); code != http.StatusBadRequest {
		t.Errorf("a wrong parameter: %d %s", code, body)
	}
	if code, body := a.get(t, "/debug/tail?since=yesterday"); code != http.StatusBadRequest {
		t.Errorf("a wrong time: %d %s", code, body)
	}
	if _, err := a.exchange("localhost.", dns.TypeTXT); err != nil {
		t.Fatal(err)
	}
	a.end()
	a.wait(t)
	for i, resp := range tails {
		lines := bufio.NewReader(resp.Body)
		if i > 0 {
			var line agent.TailLine
			text, err := lines.ReadBytes('\n')
			if err != nil || json.Unmarshal(text, &line) != nil || line.Name != "localhost." || line.Type != "TXT" || line.Took == nil {
				t.Errorf("client %d: %s, %v", i, text, err)
			}
		}
		if rest, _ := io.ReadAll(lines); len(rest) > 0 { // on a busy machine, the end of the server may cut a response off
			t.Errorf("client %d: %s", i, rest)
		}
		_ = resp.Body.Close()
	}
}
