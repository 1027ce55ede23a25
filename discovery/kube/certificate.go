package kube

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
)

// errOvertaken is returned if the Secret has changed since it was read: another replica has written it
// first, or it was deleted.
var errOvertaken = errors.New("the Secret has changed")

// Certificate keeps the certificate of the server in a Secret that all replicas share. A replica
// that finds no certificate makes one, and a replica that finds a due certificate renews it. If several replicas write the
// Secret, the API server accepts only the first. Make a Certificate with [Access.NewCertificate].
type Certificate struct {
	cfg       source.CertificateConfig
	policy    pki.Policy
	clients   *clients
	secret    *mirror[*corev1.Secret]
	publisher *publisher // nil without ConfigMaps
	bundler   *bundler   // nil without a webhook
	changed   chan struct{}
	ready     chan struct{} // closed when there is a certificate

	mu      sync.Mutex
	used    *pki.Certificates // nil until there is a certificate
	problem string            // why the Secret cannot be used or written; "" if it can
}

// NewCertificate returns the certificate that replicas share in a Secret.
func (a *Access) NewCertificate(cfg source.CertificateConfig) (source.Certificate, error) {
	clients, err := newClients(a.config)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	c := &Certificate{
		cfg: cfg, policy: pki.NewPolicy(cfg.DNSNames), clients: clients,
		changed: make(chan struct{}, 1), ready: make(chan struct{}),
	}
	c.secret = newMirror(c.String(), cfg.Logger, func() { chans.Wake(c.changed) }, func(o metav1.Object) *corev1.Secret {
		secret, _ := o.(*corev1.Secret) // the lister gets no other kind
		return secret
	})
	if cfg.ConfigMap != "" {
		c.publisher = newPublisher(cfg.ConfigMap, clients, cfg.Logger)
	}
	if cfg.Webhook != "" {
		if c.bundler, err = newBundler(cfg.Webhook, a, cfg.Logger); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// String names the Secret.
func (c *Certificate) String() string { return "Secret " + c.cfg.Secret.String() }

// Run follows the Secret until ctx ends. All its goroutines have ended when it returns.
func (c *Certificate) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() {
		syncStore(ctx, namedLister(c.clients.core, secrets, cache.NewObjectName(c.cfg.Secret.Namespace, c.cfg.Secret.Name), &corev1.Secret{}), c.secret, &c.secret.health)
	})
	if c.publisher != nil {
		group.Go(func() { c.publisher.run(ctx) })
	}
	if c.bundler != nil {
		group.Go(func() { c.bundler.run(ctx) })
	}
	keepUp(ctx, c.changed, c.step, c.logResult)
	group.Wait()
}

// Ready returns a channel that is closed when there is a certificate.
func (c *Certificate) Ready() <-chan struct{} { return c.ready }

// Get returns the certificate. It has the form of [tls.Config.GetCertificate].
func (c *Certificate) Get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used == nil {
		return nil, errors.New("there is no certificate yet")
	}
	return c.used.Server(), nil
}

// Waiting returns why there is no certificate, or "" if there is one.
func (c *Certificate) Waiting() string {
	c.mu.Lock()
	used, problem := c.used, c.problem
	c.mu.Unlock()
	switch {
	case used != nil:
		return ""
	case problem != "":
		return problem
	}
	if state := c.secret.status(); state.Failure != "" {
		return c.String() + " cannot be read: " + state.Failure
	}
	return c.String() + " has no certificate yet"
}

// Status returns the state of the resources that are read.
func (c *Certificate) Status() []source.Status {
	all := []source.Status{c.secret.status()}
	if c.publisher != nil {
		all = append(all, c.publisher.status()...)
	}
	if c.bundler != nil {
		all = append(all, c.bundler.configurations.status())
	}
	return all
}

// Untrusted reports whether the certificates of the authorities cannot be written to the configuration of the webhook,
// or another program replaces them again and again. The API server then may not trust the webhook.
func (c *Certificate) Untrusted() bool { return c.bundler != nil && c.bundler.unwritten() }

// Unpublished returns the number of namespaces that did not get the current certificates of the authorities.
func (c *Certificate) Unpublished() int {
	if c.publisher == nil {
		return 0
	}
	return c.publisher.missing()
}

// step uses the certificates in the Secret, and replaces them if they are due. The result next is the time until the
// next step if the Secret does not change earlier.
func (c *Certificate) step(ctx context.Context) (next time.Duration, err error) {
	all, ok := c.secret.all()
	if !ok {
		return recheck, nil
	}
	secret := all[cache.NewObjectName(c.cfg.Secret.Namespace, c.cfg.Secret.Name)]
	found, stored, err := c.parse(secret)
	if err != nil {
		return recheck, err
	}
	wanted, err := c.policy.Renewed(found, time.Now())
	if err != nil {
		return recheck, fmt.Errorf("%s: %w", c, err)
	}
	if wanted != found {
		// A replica whose clock is wrong must not make a certificate that all replicas and agents then use.
		if err := checkClock(ctx, c.clients.core); err != nil {
			c.use(found)
			return recheck, fmt.Errorf("%s: a certificate is due by the clock of this machine, and not made: %w", c, err)
		}
	}
	if !stored || wanted != found {
		switch err := c.write(ctx, secret, wanted); {
		case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), secret != nil && apierrors.IsNotFound(err):
			return recheck, errOvertaken
		case err != nil:
			c.use(found)
			advice := adviceForRole(err)
			if secret == nil && apierrors.IsForbidden(err) {
				advice = ": create the Secret without data, as deploy/kubernetes/discovery.yaml does"
			}
			return recheck, fmt.Errorf("%s cannot be written: %w%s", c, err, advice)
		}
		c.cfg.Logger.Info("a TLS certificate was made", "in", c.String(), "expires", wanted.Server().Leaf.NotAfter)
	}
	c.use(wanted)
	return min(max(time.Until(c.policy.Due(wanted)), time.Second), recheck), nil
}

// parse returns the certificates in a Secret. If the Secret has none, or was deleted, stored is false, and found has
// the certificates in use; nil if there are none. The caller then writes them to the Secret, so the authority that
// agents trust stays in use.
func (c *Certificate) parse(secret *corev1.Secret) (found *pki.Certificates, stored bool, err error) {
	if secret != nil {
		found, err = pki.Parse(secret.Data)
		switch {
		case errors.Is(err, pki.ErrForeign):
			return nil, true, fmt.Errorf("%s: %w: name another Secret (--tls-secret), or mount this one and name its files (--tls-cert, --tls-key)", c, err)
		case err != nil:
			return nil, true, fmt.Errorf("%s is damaged: %w: repair it, or empty its data, and replicas fill it again", c, err)
		case found != nil:
			return found, true, nil
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.used, false, nil
}

// write creates the Secret if old is nil. Otherwise it changes the Secret, unless the Secret no longer equals old.
func (c *Certificate) write(ctx context.Context, old *corev1.Secret, certificates *pki.Certificates) error {
	data, err := certificates.Data()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if old == nil {
		return c.clients.create(ctx, secrets, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: c.cfg.Secret.Namespace, Name: c.cfg.Secret.Name, Labels: labels()},
			Type:       corev1.SecretTypeTLS, Data: data,
		})
	}
	secret := old.DeepCopy()
	secret.Data = data
	return c.clients.update(ctx, secrets, secret)
}

// use puts certificates into use, unless the parameter is nil.
func (c *Certificate) use(certificates *pki.Certificates) {
	if certificates == nil {
		return
	}
	c.mu.Lock()
	previous := c.used
	c.used = certificates
	c.mu.Unlock()
	leaf := certificates.Server().Leaf
	if previous == nil || !previous.Server().Leaf.Equal(leaf) {
		c.cfg.Logger.Info("the TLS certificate is in use", "from", c.String(), "names", leaf.DNSNames, "expires", leaf.NotAfter)
	}
	if previous == nil {
		close(c.ready)
	}
	if c.publisher != nil {
		c.publisher.publish(certificates.Roots())
	}
	if c.bundler != nil {
		c.bundler.publish(certificates.Roots())
	}
}

// logResult logs an error when it begins, and when it has ended. errOvertaken changes nothing: the next step sees the
// Secret that another replica wrote.
func (c *Certificate) logResult(err error) {
	if errors.Is(err, errOvertaken) {
		return
	}
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	c.mu.Lock()
	previous := c.problem
	c.problem = problem
	c.mu.Unlock()
	if c.publisher != nil && (problem == "") != (previous == "") {
		c.publisher.doubt(problem != "")
	}
	switch problem {
	case previous:
	case "":
		c.cfg.Logger.Info("the Secret of the TLS certificate can be used again", "secret", c.String())
	default:
		c.cfg.Logger.Error("the Secret of the TLS certificate cannot be used; the certificate in use stays", "error", err)
	}
}
