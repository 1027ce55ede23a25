package discovery

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// hookYAML returns a MutatingWebhookConfiguration with two webhooks that have a caBundle.
func hookYAML(uid, bundle string) string {
	config := "{service: {name: nametap-discovery}, caBundle: '" + base64.StdEncoding.EncodeToString([]byte(bundle)) + "'}"
	return "apiVersion: admissionregistration.k8s.io/v1\nkind: MutatingWebhookConfiguration\nmetadata: {name: hook, uid: '" + uid + "'}\n" +
		"webhooks: [{name: a.test, clientConfig: " + config + "}, {name: b.test, clientConfig: " + config + "}]\n"
}

// bundles returns the fields caBundle.
func (a replicated) bundles() (all []string) {
	a.t.Helper()
	o := a.Object(fakekube.Webhooks, "/hook")
	if o == nil {
		return nil
	}
	hooks, _, err := unstructured.NestedSlice(o.Object, "webhooks")
	if err != nil {
		a.t.Fatal(err)
	}
	for _, hook := range hooks {
		text, _, err := unstructured.NestedString(hook.(map[string]any), "clientConfig", "caBundle")
		if err != nil {
			a.t.Fatal(err)
		}
		bundle, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			a.t.Fatal(err)
		}
		all = append(all, string(bundle))
	}
	return all
}

// hooked starts a replica that writes the caBundle.
func (a replicated) hooked() replica {
	a.t.Helper()
	log := testlog.New(a.t)
	cfg := a.config(log)
	cfg.TLSSecret.Webhook = "hook"
	return replica{start(a.t, cfg), log}
}

// TestWebhookBundle checks that replicas keep the caBundle of all webhooks, also of a configuration that
// comes late or is replaced, and do not undo what another replica has added.
func TestWebhookBundle(t *testing.T) { // I7, I8
	t.Parallel()
	a := newReplicated(t)
	r := a.hooked()
	a.hooked()
	roots := a.shared().Roots()
	written := func(what, want string) {
		t.Helper()
		wait.Until(t, what, func() bool {
			all := a.bundles()
			return len(all) == 2 && all[0] == want && all[1] == want
		})
	}
	a.Put(fakekube.Webhooks, hookYAML("1", ""))
	written("it is written", roots)
	a.Put(fakekube.Webhooks, hookYAML("2", "nonsense"))
	written("one that is wrong is replaced", roots)
	a.Put(fakekube.Webhooks, hookYAML("2", strings.ReplaceAll(made(t, 9000*24*time.Hour).Roots(), "\n\n", "\n")))
	written("one that has expired is replaced", roots)

	// As if another replica knew a second authority already.
	more := roots + made(t, time.Hour).Roots()
	a.Put(fakekube.Webhooks, hookYAML("3", more))
	a.Put(fakekube.Secrets, "apiVersion: v1\nkind: Secret\nmetadata: {name: other, namespace: nametap-system}\n")
	written("it stays", more)
	next, err := pki.NewPolicy(sharedNames()).Renewed(made(t, 8*365*24*time.Hour), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a.put(next, nil)
	written("both authorities are written", next.Roots())
	if n := r.log.Count("level=ERROR"); n != 0 {
		t.Errorf("%d errors", n)
	}
}

// TestWebhookForbidden checks that a replica that may not write the caBundle says so, and goes on when it
// may.
func TestWebhookForbidden(t *testing.T) { // I8
	t.Parallel()
	a := newReplicated(t)
	a.Refuse(fakekube.Webhooks+"/hook", http.StatusForbidden)
	a.Put(fakekube.Webhooks, hookYAML("1", ""))
	r := a.hooked()
	wait.Until(t, "the log names the role", func() bool {
		return r.Server.certificate.secret.Untrusted() && r.log.Count("level=ERROR", "the certificates for the webhook cannot be written", "webhook.yaml", "docs/injection.md") == 1
	})
	a.Refuse(fakekube.Webhooks+"/hook", 0)
	wait.Until(t, "it is written", func() bool { return a.bundles()[0] == a.shared().Roots() && !r.Server.certificate.secret.Untrusted() })
}

// TestWebhookDispute lets another program replace the caBundle each time it is written. It is restored at once
// at first, then ever less often, and the log names the program. When it gives up, the caBundle stays.
func TestWebhookDispute(t *testing.T) { // I8
	t.Parallel()
	a := newReplicated(t)
	stop, ended := make(chan struct{}), make(chan struct{})
	other := strings.Replace(hookYAML("1", made(t, time.Hour).Roots()), "metadata: {", "metadata: {managedFields: [{manager: argocd, operation: Apply, apiVersion: admissionregistration.k8s.io/v1, fieldsType: FieldsV1, fieldsV1: {'f:webhooks': {'k:{\"name\":\"a.test\"}': {'f:clientConfig': {'f:caBundle': {}}}}}}, {manager: nametap-discovery, operation: Apply}], ", 1)
	a.Put(fakekube.Webhooks, other)
	r := a.hooked()
	writes := func() (n int) { // includes patches that conflicted with the other program's
		for what, count := range a.Writes() {
			if strings.HasPrefix(what, "PATCH "+fakekube.Webhooks) {
				n += count
			}
		}
		return n
	}
	roots := a.shared().Roots()
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if a.bundles()[0] == roots {
					a.Put(fakekube.Webhooks, other)
				}
			}
		}
	}()
	begun := time.Now()
	wait.Until(t, "the log names the other program", func() bool {
		return r.log.Count("level=ERROR", "again and again", "argocd (Apply)", "--tls-cert") == 1
	})
	if !r.Server.certificate.secret.Untrusted() {
		t.Error("the metric does not show it")
	}
	wait.Until(t, "it pauses", func() bool { return time.Since(begun) > 3*time.Second })
	// In 3 s: the first restores with a removal of the owner each, and the restores after 1 and 2
	// s.
	if n := writes(); n < 4 || n > 40 { // on a busy machine the first ones may take the 3 s
		t.Errorf("%d writes in 3 s", n)
	}
	close(stop)
	<-ended
	wait.Until(t, "it is restored", func() bool {
		o := a.Object(fakekube.Webhooks, "/hook")
		return a.bundles()[0] == roots && len(o.GetManagedFields()) == 1 && o.GetManagedFields()[0].Manager == "argocd"
	})
	if n := r.log.Count("level=ERROR"); n != 1 {
		t.Errorf("%d errors", n)
	}
}
