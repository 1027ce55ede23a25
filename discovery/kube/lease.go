package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/logonce"
)

// leases is the name of the resource.
const leases = "leases"

// leaseTimes are the times of a Lease.
type leaseTimes struct {
	duration time.Duration // a Lease that is not renewed is free after this time; the Lease has it in seconds
	deadline time.Duration // a holder that cannot renew the Lease stops after this time, before another one may start
	retry    time.Duration // between two tries; up to a fifth is added
	request  time.Duration // bounds one request
}

// writerLease has the times of the Lease for writing VIPs. If its holder dies, another replica takes over within 15 s
// and two tries.
var writerLease = leaseTimes{duration: 15 * time.Second, deadline: 10 * time.Second, retry: 2 * time.Second, request: 5 * time.Second} //nolint:gochecknoglobals // a constant

// An election gets and renews a Lease (coordination.k8s.io), of which one process at a time is the holder. It never
// compares the clocks of two machines: the Lease of another holder is free when this process has seen it unchanged for
// as long as the Lease says.
type election struct {
	name     source.Name
	identity string
	leases   *rest.RESTClient
	times    leaseTimes
	log      *slog.Logger
	holds    atomic.Bool

	// The fields below are owned by the goroutine of run.
	lease   *coordinationv1.Lease // as last read or written; nil for none
	free    time.Time             // when the Lease of another holder ends, even if it is deleted before that
	renewed time.Time             // when this process began to send the last successful renewal
	// reading and writing are separate failures, because a role may permit only one of the two.
	reading, writing logonce.Failure
}

// run tries to get the Lease until ctx ends. While it holds the Lease, it runs the function work, whose context ends
// when the Lease is lost. At the end it gives the Lease back.
func (e *election) run(ctx context.Context, work func(ctx context.Context)) {
	for ctx.Err() == nil {
		if e.try(ctx) {
			e.hold(ctx, work)
		}
		e.pause(ctx)
	}
}

// hold renews the Lease and runs the function work, until the Lease is lost or ctx ends. The Lease is lost when another
// process has it, or when no renewal succeeds until the deadline.
func (e *election) hold(ctx context.Context, work func(ctx context.Context)) {
	leading, stop := context.WithCancel(ctx)
	defer stop()
	lost := time.AfterFunc(e.times.deadline-time.Since(e.renewed), stop)
	defer lost.Stop()
	e.holds.Store(true)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		work(leading)
	}()
	for e.pause(leading); leading.Err() == nil; e.pause(leading) {
		if e.try(leading) {
			lost.Reset(e.times.deadline - time.Since(e.renewed))
		} else if holder := e.holder(); holder != "" && holder != e.identity {
			break
		}
	}
	stop()
	<-ended
	e.holds.Store(false)
	if ctx.Err() != nil {
		e.release(context.WithoutCancel(ctx))
	}
}

// pause waits until the next try, or until ctx ends.
func (e *election) pause(ctx context.Context) {
	timer := time.NewTimer(wait.Jitter(e.times.retry, 0.2))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// holder returns the identity in the Lease as it was last seen; empty if it is free.
func (e *election) holder() string {
	if e.lease == nil || e.lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *e.lease.Spec.HolderIdentity
}

// try gets or renews the Lease, and reports whether this process holds it now.
func (e *election) try(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, e.times.request)
	defer cancel()
	began := time.Now()
	found := new(coordinationv1.Lease)
	err := e.leases.Get().Namespace(e.name.Namespace).Resource(leases).Name(e.name.Name).Do(ctx).Into(found)
	e.logResult(ctx, &e.reading, ignore(err, apierrors.IsNotFound)) // write then creates the Lease
	switch {
	case apierrors.IsNotFound(err):
		found = nil
	case err != nil:
		return false
	}
	e.observe(found)
	if time.Now().Before(e.free) {
		return false
	}
	return e.write(ctx, e.identity, began)
}

// observe notes the Lease that was read or written; nil if there is none.
func (e *election) observe(found *coordinationv1.Lease) {
	same := e.lease != nil && found != nil && e.lease.ResourceVersion == found.ResourceVersion
	if e.lease = found; found == nil || same {
		return
	}
	if e.free = (time.Time{}); e.holder() != "" && e.holder() != e.identity {
		e.free = time.Now().Add(e.lasts())
	}
}

// lasts returns how long the Lease lasts without a renewal, as its holder has written in it.
func (e *election) lasts() time.Duration {
	if seconds := e.lease.Spec.LeaseDurationSeconds; seconds != nil && *seconds > 0 {
		return time.Duration(*seconds) * time.Second
	}
	return e.times.duration
}

// write makes identity the holder of the Lease, unless the Lease has changed since it was read. It reports whether that
// succeeded. The parameter began is when the try began.
func (e *election) write(ctx context.Context, identity string, began time.Time) bool {
	next := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.name.Namespace, Name: e.name.Name}}
	if e.lease != nil {
		next = e.lease.DeepCopy()
	}
	at, seconds := metav1.NewMicroTime(began), int32(e.times.duration/time.Second)
	if identity == "" {
		seconds = 1 // Kubernetes' own components give a Lease back in this way
	}
	if e.holder() != identity || next.Spec.AcquireTime == nil {
		transitions := int32(0)
		if next.Spec.LeaseTransitions != nil {
			transitions = *next.Spec.LeaseTransitions
		}
		if e.lease != nil && identity != "" {
			transitions++
		}
		next.Spec.AcquireTime, next.Spec.LeaseTransitions = &at, &transitions
	}
	next.Spec.HolderIdentity, next.Spec.RenewTime, next.Spec.LeaseDurationSeconds = &identity, &at, &seconds
	if identity == "" {
		next.Spec.HolderIdentity = nil
	}
	request := e.leases.Post()
	if e.lease != nil {
		request = e.leases.Put().Name(e.name.Name)
	}
	written := new(coordinationv1.Lease)
	err := request.Namespace(e.name.Namespace).Resource(leases).Body(next).Do(ctx).Into(written)
	e.logResult(ctx, &e.writing, err)
	if err != nil {
		return false
	}
	e.observe(written)
	e.renewed = began
	return true
}

// release gives the Lease back, if this process holds it.
func (e *election) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, e.times.request)
	defer cancel()
	if e.holder() == e.identity {
		e.write(ctx, "", time.Now())
	}
}

// logResult logs an error of a request if the error differs from the last one. It also logs when the errors have ended.
// If another replica was first, that is no failure.
func (e *election) logResult(ctx context.Context, failure *logonce.Failure, err error) {
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || err != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return
	}
	if failure.Ended(err) {
		e.log.Info("the Lease can be used again", "lease", e.name.String())
	}
	if failure.Differs(err) {
		e.log.Error("cannot use the Lease; while no replica can, automatic VIPs are not written", "lease", e.name.String(), "error", fmt.Errorf("%w%s", err, adviceForLease(err)))
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
