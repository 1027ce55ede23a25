package nds_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/fakeclock"
	"github.com/nametap/nametap/nds"
)

// V7: after a suspend, the client opens a new stream in place of one that the peer, or a NAT,
// has forgotten. The age of the table includes the suspend.
func TestResume(t *testing.T) { // C5
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		clock := fakeclock.New()
		h := start(t, options{config: func(cfg *nds.Config) { cfg.Clock = clock.Clock }})
		h.server.Push(hosts("a.example.com"))
		h.wantACK("v1")
		h.lose() // the connections of before the suspend
		began := time.Now()
		clock.Suspend(t, time.Hour)
		if age := h.client.Status().TableAge; age < 3600 || age > 3602 {
			t.Errorf("after an hour the table is %v s old", age)
		}
		h.wantLog("level=INFO", "connecting again: this machine was suspended")
		if _, err := h.server.WaitStream(h.ctx, 2); err != nil {
			t.Fatal(err)
		}
		h.wantStatus(func(s nds.Status) bool { return s.Connected && s.TableAge < 3600 })
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the stream was replaced after %v", took)
		}
	})
}
