package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// D61: a line of the log has a part of a long text in an object.
func TestLongTextsAreCut(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), testlog.New(t)
	long := strings.Repeat("long ", 10_000)
	for name, text := range map[string]string{
		"good.yaml": "{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.0.0.1}}",
		"bad.yaml":  "{apiVersion: v1, kind: Service, metadata: {name: db, namespace: shop}, spec: {clusterIP: '" + long + "'}}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan int, 1)
	go func() {
		ended <- execute(ctx, []string{"nametap-discovery", "--config-dir", dir, "--state-dir=", "--grpc-addr=127.0.0.1:0", "--http-addr="}, log, log)
	}()
	wait.Until(t, "the error is logged", func() bool { return log.Count("long long", "bytes)") > 0 })
	cancel(errors.New("the test ends"))
	if code := wait.For(t, "the end", ended); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	for line := range strings.Lines(log.String()) {
		if len(line) > 2000 {
			t.Errorf("a line of %d bytes: %.200s", len(line), line)
		}
	}
}
