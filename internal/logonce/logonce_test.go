package logonce_test

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/logonce"
)

// C5: a failure is logged once, then with a count: once a minute, and when it changes.
func TestLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var text strings.Builder
		handler := slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})
		r := logonce.New(slog.New(handler))
		say := func(times int, reason string) {
			for i := range times {
				r.Report("failed", slog.LevelWarn, fmt.Errorf("dial 10.0.0.1:%d->10.0.0.2:1: %s", 40000+i, reason), "wait", i)
				time.Sleep(7 * time.Second) //nolint:forbidigo // advances the clock of the bubble
			}
		}
		say(12, "reset") // over 84 s
		say(2, "refused")
		r.Recover("works", "address", "b")
		say(3, "refused")
		r.Recover("works", "address", "b")
		r.Reset()
		say(1, "refused")
		for range 3 { // the time is the text of crypto/x509
			r.Report("failed", slog.LevelWarn, x509.CertificateInvalidError{Cert: &x509.Certificate{}, Reason: x509.Expired,
				Detail: fmt.Sprintf("current time %s is after 1999-01-01T00:00:00Z", time.Now().UTC().Format(time.RFC3339))})
			time.Sleep(time.Second) //nolint:forbidigo // advances the clock of the bubble
		}
		r.Reset()
		const want = `level=WARN msg=failed error="dial 10.0.0.1:40000->10.0.0.2:1: reset" wait=0
level=WARN msg=failed error="dial 10.0.0.1:->10.0.0.2:1: reset" repeated=9
level=WARN msg=failed error="dial 10.0.0.1:->10.0.0.2:1: reset" repeated=2
level=WARN msg=failed error="dial 10.0.0.1:40000->10.0.0.2:1: refused" wait=0
level=INFO msg=works address=b repeated=1
level=WARN msg=failed error="dial 10.0.0.1:->10.0.0.2:1: refused" repeated=3
level=WARN msg=failed error="dial 10.0.0.1:40000->10.0.0.2:1: refused" wait=0
level=WARN msg=failed error="x509: certificate has expired or is not yet valid: current time 2000-01-01T00:02:06Z is after 1999-01-01T00:00:00Z"
level=WARN msg=failed error="x509: certificate has expired or is not yet valid: current time is after 1999-01-01T00:00:00Z" repeated=2
`
		if diff := cmp.Diff(want, text.String()); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

// C5: a failure is logged once, until it changes, or ends and comes back.
func TestFailure(t *testing.T) {
	t.Parallel()
	var f logonce.Failure
	refused, locked := errors.New("refused"), errors.New("locked")
	for i, step := range []struct {
		err  error
		want bool
	}{{nil, false}, {refused, true}, {refused, false}, {locked, true}, {nil, false}, {locked, true}} {
		if got := f.Differs(step.err); got != step.want {
			t.Errorf("step %d, %v: %v", i, step.err, got)
		}
	}
	if f.Forget(); !f.Differs(locked) {
		t.Error("forgotten, and not logged")
	}
}
