package main

import (
	"bufio"
	"bytes"
	"cmp"
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
	"time"

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

// These bound responses, in bytes: a page of pods takes up to some MiB, and what an agent shows some 10 KiB.
const maxPage, maxShown = 64 << 20, 1 << 20

// openCluster starts the proxy. Flags of kubectl are in the parameter kubectl.
func openCluster(ctx context.Context, kubectl []string) (*cluster, error) {
	dir, err := os.MkdirTemp("", "kubectl-nametap-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for a socket: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &cluster{dir: dir, cancel: cancel}
	socket := filepath.Join(dir, "api")
	// A redirection would show another pod, or another path of the API server, in place of the agent.
	c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.http.Transport = &http.Transport{
		MaxIdleConnsPerHost: parallel,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	c.proxy = exec.CommandContext(ctx, "kubectl", append(slices.Clone(kubectl), "proxy", "--unix-socket="+socket, "--accept-paths="+served)...)
	c.proxy.Stderr, c.proxy.WaitDelay = proxyErrors{}, time.Second
	started, err := c.proxy.StdoutPipe()
	if err = cmp.Or(err, c.proxy.Start()); err != nil {
		c.close()
		return nil, err
	}
	if _, err := bufio.NewReader(started).ReadString('\n'); err != nil { // "Starting to serve on ..."
		defer c.close()
		return nil, cmp.Or(ctx.Err(), errors.New("kubectl proxy has ended: see its error above"))
	}
	return c, nil
}

// proxyErrors prints what the proxy says, without its line for each agent that does not reply: the state of the agent says that.
type proxyErrors struct{}

func (proxyErrors) Write(text []byte) (int, error) {
	if bytes.Contains(text, []byte("Error while proxying request")) {
		return len(text), nil
	}
	return os.Stderr.Write(text)
}

// close ends the proxy.
func (c *cluster) close() {
	c.cancel()
	_ = c.proxy.Wait() // it was killed, or has not started
	_ = os.RemoveAll(c.dir)
}

// get requests a path, and returns the status and the first bytes, at most limit, of the response, which a pod may have written. It
// returns an error if there is no response, or if it is an error of the API server.
func (c *cluster) get(ctx context.Context, path string, query url.Values, limit int64) (code int, body []byte, err error) {
	to := url.URL{Scheme: "http", Host: "localhost", Path: path, RawQuery: query.Encode()}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, to.String(), http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	response, err := c.http.Do(request)
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = failed.Err // without the path
	}
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err = io.ReadAll(io.LimitReader(response.Body, limit))
	var status metav1.Status
	if response.StatusCode != http.StatusOK && json.Unmarshal(body, &status) == nil && status.Kind == "Status" {
		err = errors.New(status.Message)
	}
	return response.StatusCode, body, err
}

// pods calls visit for each pod of a namespace, or of all if it is empty, that has not ended and matches a selector of
// labels.
func (c *cluster) pods(ctx context.Context, namespace, selector string, visit func(*corev1.Pod)) error {
	path := strings.Replace("/api/v1/namespaces/"+namespace+"/pods", "namespaces//", "", 1)
	query := url.Values{"limit": {"500"}, "labelSelector": {selector}, "fieldSelector": {"status.phase!=Succeeded,status.phase!=Failed"}}
	for {
		var page corev1.PodList
		code, body, err := c.get(ctx, path, query, maxPage)
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("HTTP %d: %.200s", code, clip.Line(strings.TrimSpace(string(body))))
		} else if err == nil {
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
