package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"time"
)

// A remote edits ServiceEntries of a real API server: their addresses can change, a Service's
// cannot.
type remote struct {
	client     *http.Client
	url, token string
	ctx        context.Context //nolint:containedctx // of the run: all requests end with it
	edits      int             // the last address, as a number that only grows
}

// remoteHosts is the number of ServiceEntries.
const remoteHosts = 8

// entriesPath is the path of the ServiceEntries.
const entriesPath = "/apis/networking.istio.io/v1/namespaces/default/serviceentries"

// newRemote creates the ServiceEntries, unless they exist.
func newRemote(ctx context.Context, url, token string) (*remote, error) {
	// An earlier run may have edited the same objects. It has made fewer than 100 edits a second, so its addresses differ.
	r := &remote{url: url, token: token, ctx: ctx, edits: int(time.Now().UnixMilli() / 10), client: &http.Client{
		Timeout:   time.Minute,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, //nolint:gosec // of a test's API server
	}}
	for i := range remoteHosts {
		entry := fmt.Sprintf(`{"apiVersion":"networking.istio.io/v1","kind":"ServiceEntry","metadata":{"name":"edited-%d"},"spec":{"hosts":["edited-%[1]d.example.com"],`+
			`"addresses":["192.0.2.1"],"location":"MESH_EXTERNAL","resolution":"STATIC","ports":[{"number":80,"name":"http","protocol":"HTTP"}],"endpoints":[{"address":"192.0.2.1"}]}}`, i)
		status, err := r.send(http.MethodPost, entriesPath, "application/json", entry)
		if err != nil && status != http.StatusConflict {
			return nil, err
		}
	}
	return r, nil
}

// Change changes the address of a ServiceEntry, and returns when the API server has answered.
func (r *remote) Change(i int) (time.Time, error) {
	r.edits++
	patch := fmt.Sprintf(`{"spec":{"addresses":["100.%d.%d.%d"]}}`, 64+r.edits>>16&63, r.edits>>8&255, r.edits&255)
	_, err := r.send(http.MethodPatch, fmt.Sprintf("%s/edited-%d", entriesPath, i), "application/merge-patch+json", patch)
	return time.Now(), err
}

// Len returns the number of ServiceEntries.
func (*remote) Len() int { return remoteHosts }

// send sends a request. The status is 0 without an answer.
func (r *remote) send(method, path, kind, body string) (status int, err error) {
	request, err := http.NewRequestWithContext(r.ctx, method, r.url+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return 0, fmt.Errorf("editing an object: %w", err)
	}
	request.Header.Set("Authorization", "Bearer "+r.token)
	request.Header.Set("Content-Type", kind)
	response, err := r.client.Do(request)
	if err != nil {
		return 0, fmt.Errorf("editing an object: %w (-api)", err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= http.StatusMultipleChoices {
		err = fmt.Errorf("%s %s: status %s: %s", method, path, response.Status, answer)
	}
	return response.StatusCode, err
}
