package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/internal/clip"
)

// A cluster is the API server that kubectl uses. Requests go through `kubectl proxy`, which has whatever authentication
// kubectl has: so there is one process for all requests, and no client library in the plugin.
type cluster struct {
	http   http.Client
	dir    string // has the socket of the proxy; only this user can read it
	cancel context.CancelFunc
	proxy  *exec.Cmd
}

// served matches the paths that the proxy serves: lists of pods, and what each agent shows to all of its network.
const served = `^/api/v1/(namespaces/[^/]+/)?pods$,^/api/v1/namespaces/[^/]+/pods/[^/]+/proxy/(metrics|healthz/ready)$`

// maxResponse bounds a response, in bytes. A page of pods takes up to some MiB.
const maxResponse = 64 << 20

// maxText bounds the text of a pod's error, in bytes.
const maxText = 200

// openCluster starts the proxy. Flags of kubectl are in the parameter kubectl.
func openCluster(ctx context.Context, kubectl []string) (*cluster, error) {
	dir, err := os.MkdirTemp("", "kubectl-nametap-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for a socket: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &cluster{dir: dir, cancel: cancel}
	socket := filepath.Join(dir, "api")
	c.http.Transport = &http.Transport{
		MaxIdleConnsPerHost: parallel,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	c.proxy = exec.CommandContext(ctx, "kubectl", append(slices.Clone(kubectl), "proxy", "--unix-socket="+socket, "--accept-paths="+served)...)
	c.proxy.Stderr = os.Stderr
	started, err := c.proxy.StdoutPipe()
	if err == nil {
		err = c.proxy.Start()
	}
	if err != nil {
		cancel()
		_ = os.RemoveAll(dir) // an empty directory stays at worst
		return nil, err
	}
	if _, err := bufio.NewReader(started).ReadString('\n'); err != nil { // "Starting to serve on ..."
		c.close()
		return nil, errors.New("kubectl proxy has ended: see its error above")
	}
	return c, nil
}

// close ends the proxy.
func (c *cluster) close() {
	c.cancel()
	_ = c.proxy.Wait() // it was killed
	_ = os.RemoveAll(c.dir)
}

// An apiError is an error that the API server, or the pod behind it, has answered with.
type apiError struct {
	code int
	text string
	pod  bool // whether the pod has
}

// Error implements [error].
func (e *apiError) Error() string {
	if e.pod {
		return fmt.Sprintf("%d %s: %s", e.code, http.StatusText(e.code), clip.Text(e.text, maxText))
	}
	return e.text
}

// get requests a path, and returns the body of the response.
func (c *cluster) get(ctx context.Context, path string, query url.Values) ([]byte, error) {
	to := url.URL{Scheme: "http", Host: "localhost", Path: path, RawQuery: query.Encode()}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, to.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := c.http.Do(request)
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = failed.Err // without the path
	}
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResponse))
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		var status metav1.Status
		if json.Unmarshal(body, &status) != nil || status.Message == "" {
			return nil, &apiError{response.StatusCode, strings.TrimSpace(string(body)), true}
		}
		return nil, &apiError{response.StatusCode, status.Message, false}
	}
	return body, nil
}

// pods calls visit for each pod of a namespace, or of all if it is empty, that has not ended and matches a selector of
// labels.
func (c *cluster) pods(ctx context.Context, namespace, selector string, visit func(*corev1.Pod)) error {
	path := "/api/v1/pods"
	if namespace != "" {
		path = "/api/v1/namespaces/" + namespace + "/pods"
	}
	query := url.Values{"limit": {"500"}, "labelSelector": {selector}, "fieldSelector": {"status.phase!=Succeeded,status.phase!=Failed"}}
	for {
		var page corev1.PodList
		body, err := c.get(ctx, path, query)
		if err == nil {
			err = json.Unmarshal(body, &page)
		}
		if err != nil {
			return fmt.Errorf("listing pods: %w", err)
		}
		for i := range page.Items {
			visit(&page.Items[i])
		}
		if page.Continue == "" {
			return nil
		}
		query.Set("continue", page.Continue)
	}
}
