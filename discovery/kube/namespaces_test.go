package kube_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// I16: labels and annotations of namespaces are followed. The API server is asked for one that is not
// known yet.
func TestNamespaces(t *testing.T) {
	a := fakekube.Start(t)
	put := func(mode string) {
		a.Put(fakekube.Namespaces, "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {a: b}, annotations: {nametap.dev/mode: "+mode+", kubectl.kubernetes.io/last-applied-configuration: '{}'}}\n")
	}
	put("rules")
	access, err := kube.NewAccess(a.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	n := access.NewNamespaces(testlog.New(t).Logger())
	want := func(mode string) {
		t.Helper()
		labels, annotations, err := n.Read(t.Context(), "shop")
		if diff := cmp.Diff([]map[string]string{{"a": "b"}, {"nametap.dev/mode": mode}}, []map[string]string{labels, annotations}); diff != "" || err != nil {
			t.Errorf("%v %s", err, diff)
		}
	}
	if _, _, err := n.Read(t.Context(), "shop"); err == nil { // the API server of the test answers no lists
		t.Error("no error of the API server")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.Run(ctx)
	}()
	wait.Until(t, "namespaces are followed", func() bool {
		_, _, err := n.Read(t.Context(), "shop")
		return err == nil
	})
	want("rules")
	put("resolv")
	wait.Until(t, "the annotation has changed", func() bool {
		_, annotations, err := n.Read(t.Context(), "shop")
		return err == nil && annotations["nametap.dev/mode"] == "resolv"
	})
	want("resolv")
	cancel()
	wait.For(t, "the end", ended)
}
