package nds

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/statedir"
)

// workloadFile is the name, in the state directory, of the file with the workload
// certificate, its chain and its key.
const workloadFile = "workload-certificate.pem"

const (
	// workloadPoll bounds how long the wall clock is not looked at: timers stand
	// still while a machine is suspended, and certificates expire all the same.
	workloadPoll = time.Minute
	// authorityPoll is when a control plane without a certificate authority is
	// asked again.
	authorityPoll = time.Hour
)

// errNoAuthority says that the control plane does not have the service.
var errNoAuthority = errors.New("the control plane has no certificate authority")

// WorkloadCert says when the token is exchanged for a workload certificate.
type WorkloadCert string

const (
	// WorkloadCertAuto exchanges it unless kubelet renews the token, or a client
	// certificate is given. It is the zero value's meaning too.
	WorkloadCertAuto WorkloadCert = "auto"
	// WorkloadCertOn exchanges it in any case.
	WorkloadCertOn WorkloadCert = "on"
	// WorkloadCertOff never does.
	WorkloadCertOff WorkloadCert = "off"
)

// MarshalText returns what UnmarshalText reads.
func (w WorkloadCert) MarshalText() ([]byte, error) { return []byte(w), nil }

// UnmarshalText reads "auto", "on" or "off". The error says what was expected; the caller
// names the setting and its value.
func (w *WorkloadCert) UnmarshalText(text []byte) error {
	switch v := WorkloadCert(text); v {
	case WorkloadCertAuto, WorkloadCertOn, WorkloadCertOff:
		*w = v
		return nil
	}
	return errors.New("want auto, on or off")
}

// A workload obtains a certificate for the node's identity, keeps it in the state
// directory and renews it.
type workload struct {
	cfg Config
	dir *statedir.Dir
	log *slog.Logger
	// wake makes run look at the certificate at once.
	wake chan struct{}

	mu      sync.Mutex
	current *tls.Certificate // nil without one
	pair    keyPair          // current as PEM
	kept    bool             // in the state directory
	renewal time.Time        // of current
	doubted bool             // a server refused current, and none has taken it since
	failure string           // of the last attempt, if something is to be mended
}

func newWorkload(cfg Config, dir *statedir.Dir) *workload {
	return &workload{cfg: cfg, dir: dir, log: cfg.Logger, wake: make(chan struct{}, 1)}
}

// wanted reports whether a certificate is to be obtained now. A token that kubelet
// renews needs none: kubelet writes it into a directory of its own, to which the link
// "..data" beside the token leads.
func (w *workload) wanted() bool {
	switch {
	case w.cfg.Plaintext || w.cfg.WorkloadCert == WorkloadCertOff:
		return false
	case w.cfg.WorkloadCert == WorkloadCertOn:
		return true
	case w.cfg.CertFile != "" || w.cfg.TokenFile == "":
		return false
	}
	data, err := os.Lstat(filepath.Join(filepath.Dir(w.cfg.TokenFile), "..data"))
	return err != nil || data.Mode()&fs.ModeSymlink == 0
}

// valid returns the certificate, or nil if there is none or it has expired.
func (w *workload) valid() *tls.Certificate {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == nil || !time.Now().Before(w.current.Leaf.NotAfter) {
		return nil
	}
	return w.current
}

// proof returns the certificate to prove the identity with: none if a server refused it
// and the token can take its place.
func (w *workload) proof() *tls.Certificate {
	certificate := w.valid()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.doubted && goodToken(w.cfg.TokenFile) {
		return nil
	}
	return certificate
}

// use makes pair the certificate, if it proves the node's identity. obtained is when it
// was; the zero value means when it became valid.
func (w *workload) use(pair keyPair, obtained time.Time) error {
	certificate, err := pair.parse()
	if err != nil {
		return err
	}
	leaf := certificate.Leaf
	if err := w.cfg.Node.check(leaf); err != nil {
		return err
	}
	since := obtained
	if since.IsZero() {
		since = leaf.NotBefore
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.current, w.pair, w.kept = certificate, pair, false
	w.renewal, w.doubted, w.failure = renewAt(leaf, since, rand.Float64()), false, ""
	return nil
}

// failed keeps err for the status, unless there is nothing to mend.
func (w *workload) failed(err error) {
	if w.level(err) < slog.LevelWarn {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failure = err.Error()
}

// trouble returns why there is no certificate, or no newer one; "" if all is well.
func (w *workload) trouble() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure
}

// refused says that a server refused the certificate: its authority may have changed.
// A good token takes its place until there is another one. Where the token is no longer
// good, the certificate is all there is, and the server may take it again.
func (w *workload) refused(certificate *tls.Certificate) {
	w.doubt(certificate, true)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// accepted says that a server took the certificate.
func (w *workload) accepted(certificate *tls.Certificate) { w.doubt(certificate, false) }

func (w *workload) doubt(certificate *tls.Certificate, doubted bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.current == certificate {
		w.doubted = doubted
	}
}

// renewAt is when a certificate is renewed: at two thirds of its life, or up to a
// tenth of its life earlier, by part from 0 to 1, so that machines that were set up
// together do not renew together. The life of one that was obtained just now begins now:
// authorities date certificates back, and this host's clock may be fast.
func renewAt(leaf *x509.Certificate, obtained time.Time, part float64) time.Time {
	life := leaf.NotAfter.Sub(obtained)
	return obtained.Add(max(time.Second, life*2/3-time.Duration(part*float64(life)/10)))
}

// run obtains and renews the certificate until ctx ends. It is called after load.
func (w *workload) run(ctx context.Context) {
	failures := 0
	said, unkept := repeated{log: w.log}, repeated{log: w.log}
	for {
		if err := w.keep(); err != nil {
			unkept.say("workload certificate not kept, a restart needs the token", slog.LevelWarn, err)
		} else {
			unkept.over()
		}
		wait := w.untilRenewal()
		if wait <= 0 {
			err := advise(w.cfg, w.cfg.CAAddr, "--ca-addr", w.renew(ctx))
			switch {
			case err == nil:
				failures = 0
				said.over()
				continue
			case errors.Is(err, errNoAuthority):
				wait = authorityPoll
			default:
				wait = max(time.Second, pause(failures, rand.Float64()))
				failures++
			}
			if ctx.Err() == nil {
				w.failed(err)
				said.say("no workload certificate, going on with the token", w.level(err), err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-time.After(max(wait, time.Second)):
		}
	}
}

// level is the level at which err is logged: without a certificate authority there is
// nothing to mend, unless a certificate was asked for.
func (w *workload) level(err error) slog.Level {
	if errors.Is(err, errNoAuthority) && w.cfg.WorkloadCert != WorkloadCertOn {
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

// untilRenewal is the time until the certificate is to be looked at again.
func (w *workload) untilRenewal() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case !w.wanted():
		return workloadPoll
	case w.current == nil, w.doubted && goodToken(w.cfg.TokenFile):
		return 0
	}
	return min(workloadPoll, time.Until(w.renewal.Round(0)))
}

// renew obtains a certificate and puts it to use.
func (w *workload) renew(ctx context.Context) error {
	pair, err := w.exchange(ctx)
	if err != nil {
		return err
	}
	if err := w.use(pair, time.Now()); err != nil {
		return fmt.Errorf("using the certificate of %s: %w", w.cfg.CAAddr, err)
	}
	w.mu.Lock()
	w.log.Info("workload certificate obtained", "identity", w.current.Leaf.URIs, "from", w.cfg.CAAddr,
		"expires", w.current.Leaf.NotAfter, "renewal", w.renewal)
	w.mu.Unlock()
	return nil
}

// keep writes the certificate to the state directory, unless it is there.
func (w *workload) keep() error {
	w.mu.Lock()
	pair, kept := w.pair, w.kept
	w.mu.Unlock()
	if w.cfg.StateDir == "" || len(pair.key) == 0 {
		return nil
	}
	if _, err := os.Lstat(w.dir.File(workloadFile)); kept && err == nil {
		return nil
	}
	if err := w.dir.Write(workloadFile, append(bytes.TrimSpace(pair.key), append([]byte("\n"), pair.chain...)...)); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kept = true // by run, which alone obtains others
	return nil
}

// load puts the certificate of an earlier run to use, if there is one.
func (w *workload) load() {
	if w.cfg.StateDir == "" || w.cfg.Plaintext || w.cfg.WorkloadCert == WorkloadCertOff {
		return
	}
	data, err := os.ReadFile(w.dir.File(workloadFile))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		err = w.use(split(data), time.Time{})
	}
	w.kept = err == nil
	if err != nil {
		w.log.Warn("workload certificate of an earlier run not used", "path", w.dir.File(workloadFile), "error", err)
	}
}

// split takes the private key out of a file with both.
func split(data []byte) keyPair {
	var pair keyPair
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		text := pem.EncodeToMemory(block)
		if strings.HasSuffix(block.Type, "PRIVATE KEY") {
			pair.key = append(pair.key, text...)
		} else {
			pair.chain = append(pair.chain, text...)
		}
	}
	return pair
}
