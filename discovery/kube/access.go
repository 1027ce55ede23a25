package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/decode"
)

// ErrNotInCluster is returned if the process does not run in a pod with a service account.
var ErrNotInCluster = errors.New("not in a pod with a service account")

// Access is the way to an API server, as a user.
type Access struct{ client *rest.RESTClient }

// NewAccess returns the access that the kubeconfig file at path gives in its current context. If path is "", it uses the
// pod's service account, whose token is read again when it changes; outside of a pod
// the error is [ErrNotInCluster].
func NewAccess(path string) (*Access, error) {
	if path == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, ErrNotInCluster
		}
		if err != nil {
			return nil, fmt.Errorf("the service account of the pod: %w: set automountServiceAccountToken, or name a file (--kubeconfig)", err)
		}
		return newAccess(config)
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %q: %w: name a file that kubectl can use (--kubeconfig)", path, err)
	}
	return newAccess(config)
}

// newAccess returns an access with a client that takes JSON: client-go decodes only the errors of the API server. The
// client follows no redirection: API servers do not redirect, and a request that is redirected could go to any host.
func newAccess(config *rest.Config) (*Access, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.QPS = -1 // no limit: a Reflector sends few requests, and backs off
	config.UserAgent = "nametap-discovery"
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API (--kubeconfig): %w", err)
	}
	own := *shared
	own.CheckRedirect = func(to *http.Request, _ []*http.Request) error {
		return fmt.Errorf("the API server redirects to %q, which is not allowed here", to.URL)
	}
	client, err := rest.UnversionedRESTClientForConfigAndClient(config, &own)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API (--kubeconfig): %w", err)
	}
	return &Access{client}, nil
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
	return newAccess(config)
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

// ifRefused returns advice if err says that the API server has refused a request, otherwise "".
func ifRefused(err error, advice string) string {
	if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		return advice
	}
	return ""
}

// Namespace returns the labels and annotations of a namespace.
func (a *Access) Namespace(ctx context.Context, name string) (labels, annotations map[string]string, err error) {
	one := resource{client: a.client, path: pathNamespaces, fields: selectName(name)} // the role permits no get
	text, err := do(ctx, one.request(metav1.ListOptions{}))
	var found struct {
		Items []struct {
			Metadata decode.Meta `json:"metadata"`
		} `json:"items"`
	}
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("%w%s", err, ifRefused(err, ": let nametap-discovery list and watch namespaces, see docs/discovery.md"))
	case len(found.Items) == 0:
		return nil, nil, fmt.Errorf("there is no namespace %q", name)
	}
	return found.Items[0].Metadata.Labels, found.Items[0].Metadata.Annotations, nil
}

// reviewTimeout bounds one review of a token.
const reviewTimeout = 5 * time.Second

// Reviewer returns a function that asks the API server to which account a token belongs (TokenReview). The function
// refuses a token for another audience.
func (a *Access) Reviewer(audience string) auth.Review {
	return func(ctx context.Context, token string) (auth.Identity, error) {
		ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
		defer cancel()
		review := authenticationv1.TokenReview{
			TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"},
			Spec:     authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{audience}},
		}
		body, err := json.Marshal(review)
		if err == nil {
			body, err = do(ctx, a.client.Post().AbsPath("/apis/authentication.k8s.io/v1/tokenreviews").SetHeader("Content-Type", "application/json").Body(body))
		}
		var result authenticationv1.TokenReview
		if err == nil {
			err = json.Unmarshal(body, &result)
		}
		if err != nil {
			// The API server has not judged the token, for whatever reason.
			return auth.Identity{}, fmt.Errorf("%w: %w%s", auth.ErrUnavailable, err,
				ifRefused(err, ": let nametap-discovery create tokenreviews.authentication.k8s.io, see docs/discovery.md"))
		}
		switch {
		case !result.Status.Authenticated:
			return auth.Identity{}, fmt.Errorf("the token is refused: %s", strings.TrimSpace(result.Status.Error))
		case !slices.Contains(result.Status.Audiences, audience):
			return auth.Identity{}, fmt.Errorf("the token is for %q: want the audience %s", result.Status.Audiences, audience)
		}
		return auth.OfUser(result.Status.User.Username)
	}
}
