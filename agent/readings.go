package agent

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/family"
)

// A reading is the part of the status that comes from outside the process: from iptables and
// test queries.
type reading struct {
	silent           []string
	capture          *CaptureStatus
	onlyNameserverOf string
	redirected       []probe.Result
}

// readingAge is how long a reading is kept.
const readingAge = time.Second

// readings takes one reading at a time. All requests that wait for a reading, and all requests of the next second, get
// that reading. So the cost does not grow with the number of requests.
type readings struct {
	take func(ctx context.Context) reading

	mu      sync.Mutex
	latest  reading   // guarded by mu
	takenAt time.Time // guarded by mu
}

// current returns a reading that is at most readingAge old. If there is no such reading, it takes one. The end of
// ctx does not end the reading, because other requests may wait for it.
func (r *readings) current(ctx context.Context) reading {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.takenAt.IsZero() || time.Since(r.takenAt) >= readingAge {
		r.latest, r.takenAt = r.take(context.WithoutCancel(ctx)), time.Now()
	}
	return r.latest
}

// read takes a reading for c.
func read(ctx context.Context, c *core) reading {
	found := reading{silent: probe.Errors(probe.Listeners(ctx, c.proxy.Addrs()...))}
	if c.capture != nil {
		found.capture = c.capture.status(ctx)
		return found
	}
	listeners := addrPorts(c.proxy)
	found.onlyNameserverOf = OnlyNameserverOf(c.config.DNS.Forward.ResolvConf, listeners)
	if found.onlyNameserverOf == "" {
		found.redirected = probe.Redirections(ctx, slices.DeleteFunc(family.All(), func(f family.Family) bool {
			return !slices.ContainsFunc(listeners, func(at netip.AddrPort) bool { return family.Of(at.Addr()) == f })
		}))
	}
	return found
}
