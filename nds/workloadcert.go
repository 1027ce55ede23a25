package nds

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

// certificateFile is the file in the state directory with the key of the workload certificate, the certificate and its
// chain.
const certificateFile = "workload-certificate.pem"

const (
	// certificatePoll is how often the wall clock is read to find out whether the certificate must be renewed. A
	// timer would not notice that the clock is set, or that the machine is suspended.
	certificatePoll = time.Minute
	// If a control plane has no certificate authority, the client requests a certificate again after authorityPoll.
	authorityPoll = time.Hour
)

// A certRenewer obtains a certificate for the node's identity, saves it in the state
// directory and renews it.
type certRenewer struct {
	cfg   Config
	dir   *statedir.Dir
	state *state
	// wake makes run check the certificate at once.
	wake chan struct{}

	// The fields below are owned by the goroutine of run. Before run, they are owned by the caller of load.

	// unread is true if the certificate file could not be read. Then run calls load again
	// until there is a certificate.
	unread bool
	// fileFailures logs why the certificate was not read or saved, renewFailures why none was
	// obtained.
	fileFailures, renewFailures logonce.Log
	failed                      *tls.Certificate // as in Client, of requests to the certificate authority
	unsaved                     []byte           // the current certificate, unless it is in the state directory

	// mu guards the fields below.
	mu      sync.Mutex
	current *tls.Certificate // nil if there is none
	renewal time.Time        // when to renew the current certificate
}

func newCertRenewer(cfg Config, dir *statedir.Dir, s *state) *certRenewer {
	return &certRenewer{
		cfg: cfg, dir: dir, state: s, wake: make(chan struct{}, 1),
		fileFailures: logonce.New(cfg.Logger), renewFailures: logonce.New(cfg.Logger),
	}
}

// wanted reports whether the agent should exchange the token for a certificate. By default it should not if kubelet
// renews the token. In this case, the symbolic link "..data" is next to the token: kubelet writes each token to a
// new directory, and makes the link point to this directory.
func (r *certRenewer) wanted() bool {
	switch {
	case r.cfg.Plaintext || r.cfg.WorkloadCert == WorkloadCertOff:
		return false
	case r.cfg.WorkloadCert == WorkloadCertOn:
		return true
	case r.cfg.CertFile != "" || r.cfg.TokenFile == "":
		return false
	}
	data, err := os.Lstat(filepath.Join(filepath.Dir(r.cfg.TokenFile), "..data"))
	if err != nil {
		// After any other error, the token cannot be read either, and connect reports that error.
		return errors.Is(err, fs.ErrNotExist)
	}
	return data.Mode()&fs.ModeSymlink == 0
}

// valid returns the certificate, or nil if there is none or it has expired.
func (r *certRenewer) valid() *tls.Certificate {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil || !time.Now().Before(r.current.Leaf.NotAfter) {
		return nil
	}
	return r.current
}

// certificateAfter returns the certificate for the next connect, or nil if there is none. It also returns nil if the last
// connect failed with this certificate and the token can replace it: a server that refuses the certificate, because its
// certificate authority has changed, may end the connection without giving a reason. Without a usable token the
// certificate is tried again.
func (r *certRenewer) certificateAfter(failed *tls.Certificate) *tls.Certificate {
	certificate := r.valid()
	if certificate != nil && certificate == failed && usableToken(r.cfg) {
		return nil
	}
	return certificate
}

// accept makes the certificate in file, in PEM with its chain and its key, the current certificate, unless it has expired
// or is for another identity. obtained is when it was issued. If obtained is zero, accept uses the time from which the
// certificate is valid.
func (r *certRenewer) accept(file []byte, obtained time.Time) error {
	certificate, err := tls.X509KeyPair(file, file)
	if err != nil {
		return err
	}
	leaf := certificate.Leaf
	if err := r.cfg.Node.checkCertificate(leaf); err != nil {
		return err
	}
	if obtained.IsZero() {
		obtained = leaf.NotBefore
	}
	r.mu.Lock()
	r.current, r.renewal = &certificate, renewAt(leaf, obtained, rand.Float64())
	r.mu.Unlock()
	r.state.update(func(s *Status) { s.CertificateError = "" })
	return nil
}

// report logs and records why no certificate was obtained. Unless the settings demand a certificate, it is expected that a
// control plane has no certificate authority.
func (r *certRenewer) report(err error) {
	level := slog.LevelInfo
	if !errors.Is(err, errNoAuthority) || r.cfg.WorkloadCert == WorkloadCertOn {
		level = slog.LevelWarn
		r.state.update(func(s *Status) { s.CertificateError = err.Error() })
	}
	r.renewFailures.Report("workload certificate not obtained or renewed", level, err)
}

// replace makes run renew the certificate at once: a server has accepted the token, and not the certificate.
func (r *certRenewer) replace(certificate *tls.Certificate) {
	r.mu.Lock()
	if r.current == certificate {
		r.renewal = time.Now()
	}
	r.mu.Unlock()
	r.check()
}

// check wakes run, which then checks whether to renew the certificate.
func (r *certRenewer) check() { chans.Wake(r.wake) }

// renewAt returns when to renew a certificate: after two thirds of its life, but up to a tenth of its life earlier.
// The parameter part, a random number from 0 to 1, says how much earlier: machines that were set up together must not
// renew together. The life starts at obtained. For a new certificate, obtained is when the client got it. It is not
// NotBefore, because authorities backdate certificates, and the clock of this host may be fast.
func renewAt(leaf *x509.Certificate, obtained time.Time, part float64) time.Time {
	life := leaf.NotAfter.Sub(obtained) // at most 292 years, so twice its value may not be a Duration
	return obtained.Add(max(time.Second, life/3*2-time.Duration(part*float64(life)/10)))
}

// run obtains and renews the certificate until ctx ends. The caller has called load.
func (r *certRenewer) run(ctx context.Context) {
	failures := 0
	for {
		if r.unread && r.valid() == nil {
			r.load()
		}
		r.save()
		wait := r.untilCheck()
		if wait <= 0 {
			err := r.renew(ctx)
			switch {
			case err == nil:
				failures = 0
				r.renewFailures.Reset()
				continue
			case errors.Is(err, errNoAuthority):
				wait = authorityPoll
			default:
				wait = max(time.Second, pause(failures, rand.Float64()))
				failures++
			}
			if ctx.Err() == nil {
				r.report(classify(r.cfg, r.cfg.CAAddr, "--ca-addr", err).advise(err))
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-time.After(max(wait, time.Second)):
		}
	}
}

// untilCheck returns the time until the next check of the certificate. If the time is 0 or less, the certificate
// must be renewed now.
func (r *certRenewer) untilCheck() time.Duration {
	if !r.wanted() {
		return certificatePoll
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current == nil {
		return 0
	}
	return min(certificatePoll, time.Until(r.renewal.Round(0)))
}

// renew obtains a certificate and makes it the current certificate.
func (r *certRenewer) renew(ctx context.Context) error {
	current := r.certificateAfter(r.failed)
	file, err := requestCertificate(ctx, r.cfg, current)
	if err != nil {
		r.failed = current
		return err
	}
	if err := r.accept(file, time.Now()); err != nil {
		return fmt.Errorf("using the certificate of %s: %w", r.cfg.CAAddr, err)
	}
	r.unsaved = file
	r.mu.Lock()
	leaf, renewal := r.current.Leaf, r.renewal
	r.mu.Unlock()
	r.cfg.Logger.Info("workload certificate obtained", "identity", leaf.URIs, "from", r.cfg.CAAddr,
		"expires", leaf.NotAfter, "renewal", renewal)
	return nil
}

// save writes the certificate to the state directory, unless it is there. If that fails, it logs the failure, and the next
// call tries again.
func (r *certRenewer) save() {
	if r.cfg.StateDir == "" || r.unsaved == nil {
		return
	}
	if err := r.dir.Write(certificateFile, r.unsaved); err != nil {
		r.fileFailures.Report("workload certificate not saved: a restart needs the token", slog.LevelWarn, err)
		return
	}
	r.fileFailures.Reset()
	r.unsaved = nil
}

// load makes the certificate in the state directory the current certificate. It does nothing if there is no file. If
// the file cannot be read now, run calls load again later, because the certificate may be the only credential: the
// token may have expired.
func (r *certRenewer) load() {
	r.unread = false
	if r.cfg.StateDir == "" || r.cfg.Plaintext || r.cfg.WorkloadCert == WorkloadCertOff {
		return
	}
	path := r.dir.File(certificateFile)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		r.unread = true
		r.fileFailures.Report("the saved workload certificate cannot be read; retrying", slog.LevelWarn, err)
		return
	}
	if err := r.accept(data, time.Time{}); err != nil {
		r.cfg.Logger.Warn("the saved workload certificate is not used", "path", path, "error", err)
	}
}
