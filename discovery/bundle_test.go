package discovery

import (
	"encoding/base64"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

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

// TestWebhookBundle checks that replicas keep the caBundle of all webhooks, also of a configuration that
// comes late or is replaced.
func TestWebhookBundle(t *testing.T) { // I7, I8
	t.Parallel()
	a := newReplicated(t)
	log := testlog.New(t)
	cfg := a.config(log)
	cfg.TLSSecret.Webhook = "hook"
	start(t, cfg)
	start(t, cfg)
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
	a.Put(fakekube.Webhooks, hookYAML("2", made(t, 9000*24*time.Hour).Roots()))
	written("one that has expired is replaced", roots)
	if n := log.Count("level=ERROR"); n != 0 {
		t.Errorf("%d errors", n)
	}
}
