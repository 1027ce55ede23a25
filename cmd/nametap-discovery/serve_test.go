package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/discovery"
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
		ended <- execute(ctx, []string{"nametap-discovery", "--config-dir", dir, "--grpc-addr=127.0.0.1:0", "--http-addr="}, log, log)
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

// D42: in a pod it serves on for 5 s after SIGTERM, and is not ready any more. Without clients, and elsewhere, it ends at
// once.
func TestDrain(t *testing.T) {
	for name, tt := range map[string]struct {
		pod   string
		ready bool
		want  time.Duration
	}{
		"in a pod": {"10.96.0.1", true, 5 * time.Second}, "not ready": {"10.96.0.1", false, 0}, "elsewhere": {"", true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(inPod, tt.pod)
			synctest.Test(t, func(t *testing.T) {
				ready := make(chan struct{})
				if tt.ready {
					close(ready)
				}
				stopping, stop := context.WithCancel(t.Context())
				ctx, cancel := afterDrain(stopping, ready, testlog.New(t).Logger())
				defer cancel()
				if time.Sleep(time.Hour); ctx.Err() != nil { //nolint:forbidigo // of the bubble's clock
					t.Error("it ends without a signal")
				}
				stop()
				began := time.Now()
				<-ctx.Done()
				if took := time.Since(began); took != tt.want {
					t.Errorf("it serves on for %v, want %v", took, tt.want)
				}
				probe := httptest.NewRecorder()
				request := httptest.NewRequest(http.MethodGet, "/healthz/ready", http.NoBody)
				statusHandler(stopping, new(discovery.Server), prometheus.NewRegistry()).ServeHTTP(probe, request)
				if probe.Code != http.StatusServiceUnavailable || !strings.Contains(probe.Body.String(), "draining") {
					t.Errorf("the readiness probe gets %d %s", probe.Code, probe.Body)
				}
			})
		})
	}
}
