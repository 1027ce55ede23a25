package nds_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// found returns the codes of the problems of a client, and the first problem.
func found(t *testing.T, client *nds.Client) (codes string, first condition.Problem) {
	t.Helper()
	report := condition.Judge(client.Conditions())
	all := []string{}
	for _, p := range report.Problems {
		all = append(all, string(p.Code))
		if p.Evidence == "" || p.Effect == "" || p.Mend == "" || len(p.Rows) == 0 || strings.Contains(p.What, "%!") {
			t.Errorf("incomplete: %+v", p)
		}
	}
	if len(report.Problems) > 0 {
		first = report.Problems[0]
	}
	return strings.Join(all, " "), first
}

// issued returns a token with these times.
func issued(from, to time.Time) string {
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(`{"alg":"none"}`)) + "." + encode(fmt.Appendf(nil, `{"iat":%d,"exp":%d}`, from.Unix(), to.Unix())) + ".c2ln"
}

// R15: what is wrong on this host is known before anything was sent.
func TestConditionsOfFiles(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		from, to   time.Duration // of the token
		root       string
		codes, say string
	}{
		"right":            {from: -time.Hour, to: time.Hour, codes: "control_plane_unreachable", say: "the control plane istiod:15012 is not connected"},
		"expired":          {from: -2 * time.Hour, to: -time.Hour, codes: "token_expired", say: "the token for the control plane has expired"},
		"expires":          {from: -55 * time.Minute, to: 5 * time.Minute, codes: "control_plane_unreachable token_expires", say: "the control plane istiod:15012 is not connected"},
		"the clock":        {from: time.Hour, to: 2 * time.Hour, codes: "clock_behind", say: "the clock of this host is at least "},
		"no root":          {from: -time.Hour, to: time.Hour, root: "absent", codes: "control_plane_file", say: "the agent cannot use root certificates (XDS_ROOT_CA, --xds-root-ca)"},
		"no certificate":   {from: -time.Hour, to: time.Hour, root: "token", codes: "control_plane_file", say: "the agent cannot use root certificates"},
		"no token":         {codes: "control_plane_file", say: "the agent cannot use the token (--xds-token-file)"},
		"token of no time": {to: time.Hour, codes: "control_plane_unreachable", say: "the control plane istiod:15012 is not connected"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			cfg := testConfig("istiod:15012")
			cfg.Plaintext, cfg.WorkloadCert, cfg.TokenFile = false, nds.WorkloadCertOff, filepath.Join(dir, "token")
			if tc.root != "" {
				cfg.RootCA = filepath.Join(dir, tc.root)
			}
			switch now := time.Now(); {
			case tc.from != 0:
				write(t, cfg.TokenFile, issued(now.Add(tc.from), now.Add(tc.to)))
			case tc.to != 0:
				write(t, cfg.TokenFile, jwt(now.Add(tc.to)))
			}
			client, err := nds.New(cfg, func(map[int][]byte) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			codes, first := found(t, client)
			if codes != tc.codes || !strings.HasPrefix(first.What, tc.say) {
				t.Errorf("%s: %q, want %s: %q", codes, first.What, tc.codes, tc.say)
			}
			if os.WriteFile(cfg.TokenFile, []byte(issued(time.Now().Add(-time.Hour), time.Now().Add(time.Hour))), 0o600) != nil {
				t.Fatal("the token is not written")
			}
			if codes, _ := found(t, client); tc.root == "" && codes != "control_plane_unreachable" {
				t.Errorf("with another token: %s", codes)
			}
		})
	}
}

// R15: the error of a connection says what is wrong, and its text tells what to do.
func TestConditionsOfErrors(t *testing.T) {
	t.Parallel()
	grpcError := func(code codes.Code, text string) error { return status.Error(code, text) }
	for _, tc := range []struct {
		err       error
		code, say string
	}{
		{&net.DNSError{Err: "no such host", Name: "istiod", IsNotFound: true}, "unresolved", "the name of the control plane 127.0.0.1:15010 does not resolve"},
		{&net.DNSError{Err: "i/o timeout", Name: "istiod", IsTimeout: true}, "unresolved", "the name of the control plane 127.0.0.1:15010 does not resolve"},
		{syscall.ECONNREFUSED, "unreachable", "the control plane 127.0.0.1:15010 refuses connections"},
		{syscall.EPERM, "unreachable", "the control plane 127.0.0.1:15010 cannot be reached: a firewall of this host"},
		{os.ErrDeadlineExceeded, "unreachable", "the control plane 127.0.0.1:15010 does not answer"},
		{errors.New("the server accepted the connection, but no stream within 10s"), "unreachable", "the control plane 127.0.0.1:15010 accepts connections, but no stream"},
		{syscall.EHOSTUNREACH, "unreachable", "the control plane 127.0.0.1:15010 "},
		{errors.New("remote error: tls: bad certificate"), "refuses", "the control plane 127.0.0.1:15010 refuses the agent"},
		{errors.New("tls: failed to verify certificate: x509: certificate signed by unknown authority"), "refuses", "the agent does not accept the certificate of the control plane 127.0.0.1:15010"},
		{grpcError(codes.PermissionDenied, "no"), "refuses", "the control plane 127.0.0.1:15010 refuses the agent"},
		{grpcError(codes.Unauthenticated, "no"), "refuses", "the control plane 127.0.0.1:15010 refuses the agent"},
		{grpcError(codes.Unavailable, "reviewing the token: certificate of 10.96.0.1:443: dial tcp: lookup kubernetes: no such host"), "unreachable", "the control plane 127.0.0.1:15010 answers, and ends the connection"},
	} {
		subtest(t, tc.err.Error(), func(t *testing.T) {
			t.Helper()
			h := start(t, options{config: func(cfg *nds.Config) {
				cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, tc.err }
			}})
			h.wantStatus(func(s nds.Status) bool { return s.Reconnects > 2 })
			codes, first := found(t, h.client)
			if codes != "control_plane_"+tc.code || !strings.HasPrefix(first.What, tc.say) || !strings.Contains(first.Evidence, " attempts since the start)") {
				t.Errorf("%s: %q, want %s: %q", codes, first.What, tc.code, tc.say)
			}
		})
	}
}

// R15: errors that alternate are one problem. An alert on its code fires, because the code stays.
func TestConditionsOfAlternatingErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var attempts atomic.Int64
		h := start(t, options{config: func(cfg *nds.Config) {
			dial := cfg.Dial
			cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				attempt := attempts.Add(1)
				if attempt > 40 {
					return dial(ctx, addr)
				}
				return nil, []error{syscall.EPIPE, errors.New("remote error: tls: bad certificate"), &net.DNSError{Err: "no such host"}}[attempt%3]
			}
		}})
		h.wantStatus(func(s nds.Status) bool { return s.Reconnects > 1 })
		var window condition.Window
		for readings := 0; attempts.Load() < 40; readings++ {
			window.Add(time.Now(), h.client.Conditions())
			report := condition.Judge(window.Conditions(time.Now()))
			if lasts := readings > 6; lasts && (len(report.Problems) != 1 || report.Problems[0].Code != "control_plane_refuses") {
				t.Fatalf("reading %d: %+v", readings, report.Problems)
			}
			clock.Sleep(t.Context(), 3*time.Second)
		}
		h.server.Push(hosts("a"))
		h.wantStatus(func(s nds.Status) bool { return s.Connected })
		if codes, _ := found(t, h.client); codes != "" {
			t.Errorf("connected: %s", codes)
		}
	})
}

// R15: a push that is rejected, a table that does not come, a snapshot that nothing confirms.
func TestConditionsOfTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		state := func(cfg *nds.Config) { cfg.StateDir = dir }
		h := start(t, options{config: state, apply: func(shards map[int][]byte) error {
			if len(shards) > 2 {
				return errors.New("too many")
			}
			return nil
		}})
		h.wantStatus(func(s nds.Status) bool { return s.Open })
		if codes, first := found(t, h.client); codes != "table_absent" || first.Severity != condition.Severe {
			t.Errorf("before the first push: %s", codes)
		}
		h.server.Push(hosts("a"))
		h.wantStatus(func(s nds.Status) bool { return s.Loaded })
		if codes, _ := found(t, h.client); codes != "" {
			t.Errorf("with a table: %s", codes)
		}
		h.server.Push(hosts(strings.Split("abcdefghijklmnopqrstuvw", "")...))
		h.wantStatus(func(s nds.Status) bool { return s.Rejected == 1 })
		if codes, first := found(t, h.client); codes != "push_rejected" || first.Severity != condition.Minor || !strings.Contains(first.Evidence, "too many") {
			t.Errorf("after a push that is rejected: %s, %+v", codes, first)
		}
		h.server.Push(hosts("a"))
		h.wantStatus(func(s nds.Status) bool { return s.Pushes == 3 })
		if codes, _ := found(t, h.client); codes != "" {
			t.Errorf("after the next push: %s", codes)
		}
		h.stop()

		again := start(t, options{server: serve(t, fakexds.Options{}), config: state})
		again.wantStatus(func(s nds.Status) bool { return s.Open })
		if codes, first := found(t, again.client); codes != "table_stale" || first.Severity != condition.Severe {
			t.Errorf("with the snapshot: %s", codes)
		}
	})
}
