package node

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
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// An api is a client of the API server. All methods may be called from several goroutines.
type api struct{ client *http.Client }

// newAPI returns a client that connects from within a network namespace.
func newAPI(ns *netns.NS) api {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		ns.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, address) })
		return conn, err
	}
	return api{&http.Client{
		Transport: &http.Transport{DialContext: dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, MaxIdleConnsPerHost: 20},
		Timeout:   30 * time.Second,
	}}
}

// errAbsent is the error for an object that does not exist.
var errAbsent = errors.New("the object does not exist")

// do sends a request with a body, unless in is nil, and decodes the response into out, unless
// out is nil.
func (a api) do(method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	// Objects are deleted after the end of the test's context.
	request, err := http.NewRequestWithContext(context.Background(), method, "https://127.0.0.1:6443"+path, body)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+adminToken)
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode == http.StatusNotFound {
		return fmt.Errorf("%s %s: %w", method, path, errAbsent)
	}
	if response.StatusCode >= 300 {
		var status metav1.Status
		if json.Unmarshal(text, &status) == nil && status.Message != "" {
			return fmt.Errorf("%s %s: %s", method, path, status.Message)
		}
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, strings.TrimSpace(string(text)))
	}
	switch out := out.(type) {
	case nil:
		return nil
	case *string:
		*out = string(text)
		return nil
	}
	return json.Unmarshal(text, out)
}

func (a api) get(path string, out any) error   { return a.do(http.MethodGet, path, nil, out) }
func (a api) create(path string, in any) error { return a.do(http.MethodPost, path, in, nil) }

// delete deletes an object, if it exists.
func (a api) delete(t *testing.T, path string) {
	t.Helper()
	if err := a.do(http.MethodDelete, path, nil, nil); err != nil && !errors.Is(err, errAbsent) {
		t.Errorf("deleting: %v", err)
	}
}
