package kube

import (
	"errors"
	"fmt"
	"net/http"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ErrNotInCluster says that the process does not run in a pod with a service account.
var ErrNotInCluster = errors.New("not in a pod with a service account")

// Access says how to reach an API server, and as which user.
type Access struct{ config *rest.Config }

// NewAccess returns the access that a kubeconfig file gives in its current context. With an empty
// path it is that of the pod's service account, whose token is read again as it rotates; outside of
// a pod the error is [ErrNotInCluster].
func NewAccess(path string) (*Access, error) {
	config, err := load(path)
	if err != nil {
		return nil, err
	}
	config.QPS = -1 // a Reflector sends few requests, and backs off
	config.UserAgent = "nametap-discovery"
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return prompt{rt} })
	return &Access{config}, nil
}

// prompt is a transport that returns a response without the server's wish when the request should be
// repeated. While the API server starts, it wants 5 s, which client-go would wait without a word, up to ten
// times. Everything here that sends requests reports a failure and has pauses of its own.
type prompt struct{ http.RoundTripper }

// RoundTrip sends a request.
func (p prompt) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := p.RoundTripper.RoundTrip(request)
	if err == nil {
		response.Header.Del("Retry-After")
	}
	return response, err
}

func load(path string) (*rest.Config, error) {
	if path == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, ErrNotInCluster
		}
		if err != nil {
			return nil, fmt.Errorf("the service account of the pod: %w: set automountServiceAccountToken, or name a file (--kubeconfig)", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %q: %w: name a file that kubectl can use (--kubeconfig)", path, err)
	}
	return config, nil
}
