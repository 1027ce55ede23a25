package kube

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// ErrNotInCluster is returned if the process does not run in a pod with a service account.
var ErrNotInCluster = errors.New("not in a pod with a service account")

// Access says how to reach an API server, and as which user.
type Access struct{ config *rest.Config }

// NewAccess returns the access that the kubeconfig file at path gives in its current context. If path is "", it uses the
// pod's service account, whose token is read again when it changes; outside of a pod
// the error is [ErrNotInCluster].
func NewAccess(path string) (*Access, error) {
	config, err := load(path)
	if err != nil {
		return nil, err
	}
	return newAccess(config), nil
}

func newAccess(config *rest.Config) *Access {
	config.QPS = -1 // no limit: a Reflector sends few requests, and backs off
	config.UserAgent = "nametap-discovery"
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return prompt{rt} })
	return &Access{config}
}

// prompt is a transport that removes the header Retry-After from responses. While the API server starts, the header
// says 5 s, and client-go would wait that long up to ten times, without a line in the log. The code here that sends
// requests reports failures itself, and has pauses of its own.
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

// ParseAccess returns the access that a kubeconfig gives in its current context. A program that may write the Secret
// with the kubeconfig must not gain access to this host by it. So, as in istiod, the kubeconfig must not run programs
// or read files. It must also not lead requests elsewhere, by a proxy or a redirection. The API server must prove its
// identity, because it reviews the tokens of its cluster's clients.
func ParseAccess(kubeconfig []byte) (*Access, error) {
	parsed, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("want a kubeconfig: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(parsed.AuthInfos)) {
		if field := unsafeField(parsed.AuthInfos[name]); field != "" {
			return nil, fmt.Errorf("user %q has the field %s, which is not allowed here: want a token, or a certificate and a key, in the kubeconfig itself", name, field)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(parsed.Clusters)) {
		if err := checkCluster(parsed.Clusters[name]); err != nil {
			return nil, fmt.Errorf("cluster %q %w", name, err)
		}
	}
	// Validate opens files, so it comes after the checks.
	if err := clientcmd.Validate(*parsed); err != nil {
		return nil, fmt.Errorf("want a kubeconfig: %w", err)
	}
	config, err := clientcmd.NewDefaultClientConfig(*parsed, &clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("want a kubeconfig: %w", err)
	}
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return direct{rt} })
	return newAccess(config), nil
}

// unsafeField returns the name of a field that runs a program or reads a file; empty if there is none.
func unsafeField(user *api.AuthInfo) string {
	switch {
	case user.Exec != nil:
		return "exec"
	case user.AuthProvider != nil:
		return "auth-provider"
	case user.TokenFile != "":
		return "tokenFile"
	case user.ClientCertificate != "":
		return "client-certificate"
	case user.ClientKey != "":
		return "client-key"
	}
	return ""
}

// checkCluster returns an error if a cluster reads a file, leads requests elsewhere, or accepts any API server.
func checkCluster(cluster *api.Cluster) error {
	const certificate = "want the certificate of its authority in certificate-authority-data"
	server, err := url.Parse(cluster.Server)
	switch {
	case cluster.CertificateAuthority != "":
		return errors.New("has the field certificate-authority, which is not allowed here: " + certificate)
	case cluster.ProxyURL != "":
		return errors.New("has the field proxy-url, which is not allowed here: want an API server that is reached without a proxy")
	case cluster.InsecureSkipTLSVerify:
		return errors.New("has the field insecure-skip-tls-verify, which is not allowed here: " + certificate)
	case err != nil || server.Scheme != "https" || server.Host == "":
		return fmt.Errorf("has %q in the field server: want https://HOST:PORT", cluster.Server)
	}
	return nil
}

// direct is a transport that returns an error in place of a redirection. API servers do not redirect. Without this
// transport, client-go would follow a redirection to any host, even without TLS.
type direct struct{ http.RoundTripper }

// RoundTrip sends a request.
func (d direct) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := d.RoundTripper.RoundTrip(request)
	if err == nil && response.StatusCode/100 == 3 && response.StatusCode != http.StatusNotModified {
		_ = response.Body.Close() // it is not read
		return nil, fmt.Errorf("the API server %s redirects to %q, which is not allowed here", request.URL.Host, response.Header.Get("Location"))
	}
	return response, err
}

// ifRefused returns advice if err says that the API server has refused a request, otherwise "".
func ifRefused(err error, advice string) string {
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		return advice
	}
	return ""
}
