package kube

import (
	"context"
	"fmt"
	"log/slog"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// An observedLock logs why a Lease cannot be read or written, and when that ends. The library's own log has a
// line for each try.
type observedLock struct {
	resourcelock.Interface
	log *slog.Logger
	// The last failures that were logged and have not ended: one may read but not write.
	reading, writing string
}

// Get reads the Lease.
func (l *observedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	l.note(ctx, &l.reading, ignore(err, apierrors.IsNotFound)) // it is created then
	return record, raw, err
}

// Create creates the Lease.
func (l *observedLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Create(ctx, record)
	l.note(ctx, &l.writing, err)
	return err
}

// Update writes the Lease.
func (l *observedLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	err := l.Interface.Update(ctx, record)
	l.note(ctx, &l.writing, err)
	return err
}

// note logs the result of a request, unless it is that of the one before it. That another replica was first
// is no failure.
func (l *observedLock) note(ctx context.Context, logged *string, err error) {
	switch {
	case ctx.Err() != nil || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
	case err == nil && *logged != "":
		*logged = ""
		l.log.Info("the Lease can be used again", "lease", l.Describe())
	case err != nil && err.Error() != *logged:
		*logged = err.Error()
		l.log.Error("cannot use the Lease; while no replica can, automatic VIPs are not written", "lease", l.Describe(), "error", fmt.Errorf("%w%s", err, adviceForLease(err)))
	}
}

// adviceForLease says what to do about an error of the API server.
func adviceForLease(err error) string {
	switch {
	case apierrors.IsForbidden(err):
		return ": let nametap-discovery get, create and update leases, see docs/discovery.md (--lease)"
	case apierrors.IsNotFound(err):
		return ": create the namespace, or name another one (--lease)"
	}
	return ""
}
