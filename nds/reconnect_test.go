package nds_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/net/http2"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// C5: the table stays in use while the control plane is away, and Status has its age. Attempts that fail for the same
// reason are logged once, and once more, with the count, when the control plane is back.
func TestControlPlaneAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := start(t, options{})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		h.wantApplied(plain(t, hosts("a.example.com")))
		h.server.Stop()
		h.wantLog("level=WARN", "no stream to the control plane", "connection refused", "(--xds-addr)")
		h.wantStatus(func(s nds.Status) bool {
			return !s.Connected && s.Loaded && !s.Stale && s.Version == "v1" && s.TableAge > 0 && s.Reconnects >= 6 &&
				strings.Contains(s.LastError, "connection refused")
		})
		h.wantNothingApplied()
		if n := h.logs.Count("level=WARN"); n != 1 {
			t.Errorf("%d warnings", n)
		}

		h.server.Push(hosts("b.example.com"))
		if err := h.server.Restart(); err != nil {
			t.Fatal(err)
		}
		h.wantApplied(plain(t, hosts("b.example.com")))
		h.wantACK("v2")
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.LastError == "" })
		h.wantLog("level=INFO", "the stream to the control plane is back", "repeated=")
	})
}

// C10: the client backs off from a control plane that pushes and then ends the stream.
func TestBackOffFromPushAndEnd(t *testing.T) {
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		plane.EndAfterAnswer = true
		h := start(t, options{plane: plane})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		// Pauses of 50 ms on average, as after a first failure, would allow 80 streams in
		// this time; pauses that double allow 7.
		const many = 25
		ctx, cancel := context.WithTimeout(h.ctx, 4*time.Second)
		defer cancel()
		if _, err := h.server.WaitStream(ctx, many); err == nil {
			t.Fatalf("%d streams within 4 s", many)
		}
		if _, err := h.server.WaitStream(h.ctx, 3); err != nil {
			t.Fatal(err)
		}
		h.wantStatus(func(s nds.Status) bool { return s.Loaded && s.Version == "v1" })
	})
}

// C5: a peer that vanished without closing the connection is noticed.
func TestKeepalive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := start(t, options{})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		began := time.Now()
		h.lose()
		h.wantLog("no stream to the control plane", "keepalive")
		if took := time.Since(began); took < 10*time.Second || took > 31*time.Second {
			t.Fatalf("it took %v", took)
		}
		if _, err := h.server.WaitStream(h.ctx, 2); err != nil {
			t.Fatal(err)
		}
	})
}

// C5: after "too_many_pings" the client pings less often on later connections.
func TestTooManyPings(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		config, _ := peers(answer(http2.FrameHeaders, func(f *http2.Framer) error {
			return cmp.Or(f.WriteGoAway(1, http2.ErrCodeEnhanceYourCalm, []byte("too_many_pings")), io.EOF) // ends the connection
		}))
		h := start(t, options{config: config})
		h.wantLog("level=WARN", "too many pings", "every=40s")
		h.wantLog("level=WARN", "too many pings", "every=1m20s")
		h.wantLog("level=WARN", "too many pings", "every=6m0s")
	})
}

// C5: the metrics during the life of a stream.
func TestMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		h := start(t, options{
			config: func(cfg *nds.Config) { cfg.Registerer = registry },
			apply: func(shards map[int][]byte) error {
				if len(flat(shards)) == 0 {
					return errors.New("empty")
				}
				return nil
			},
		})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v2")
		h.server.PushBytes(nil)
		h.wantAnswer("v3")
		got := map[string]float64{}
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, m := range family.GetMetric() {
				name := []string{family.GetName()}
				for _, label := range m.GetLabel() {
					name = append(name, label.GetValue())
				}
				got[strings.Join(name, " ")] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		for name, value := range map[string]float64{
			"nametap_xds_connected": 1, "nametap_xds_reconnects_total": 0, "nametap_xds_table_stale": 0,
			"nametap_xds_pushes_total applied": 1, "nametap_xds_pushes_total rejected": 1, "nametap_xds_pushes_total unchanged": 1,
		} {
			if have, ok := got[name]; !ok || have != value {
				t.Errorf("%s is %v, want %v", name, have, value)
			}
		}
		if digest := got["nametap_xds_table_digest"]; digest <= 0 || digest >= 1<<48 || digest != math.Trunc(digest) {
			t.Errorf("the checksum of the table is %v", digest)
		}
		if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) != 0 {
			t.Fatal(problems, err)
		}
		if n, err := testutil.GatherAndCount(registry); err != nil || n != 11 {
			t.Fatalf("%d series, %v", n, err)
		}
	})
}
