package discovery

import (
	"log/slog"
	runtimemetrics "runtime/metrics"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/connlimit"
)

const (
	// streamShare is the part of the memory limit, in percent, beyond which streams are refused, and connShare the part
	// beyond which connections are closed as soon as they are accepted. The client of a refused stream gets the reason.
	streamShare, connShare = 90, 100
	// tableShare is the part beyond which the server makes no more large tables that only some namespaces see, for
	// example because of a Sidecar. A client that does not read keeps its table in memory, and a tenant may have many
	// such clients. The rest of the memory is for clients that share a table.
	tableShare = 60
)

// memoryLimit refuses clients while the process uses nearly all of its memory. A client of an address with fewer connections
// than another takes the place of a connection of that one instead. Otherwise the kernel would kill the
// process, which ends the streams of all clients. A refused client keeps its table, and connects again later.
type memoryLimit struct {
	bytes   int64 // 0 for no limit
	refused func()
	log     *slog.Logger
	lines   rate.Sometimes
}

func newMemoryLimit(bytes int64, refused func(), log *slog.Logger) *memoryLimit {
	return &memoryLimit{bytes: bytes, refused: refused, log: log, lines: rate.Sometimes{Interval: time.Minute}}
}

// check returns and counts an error if more of the limit is in use than the parameter share, in percent, unless the place is
// of a client to which another one gives way. The place may be nil.
func (m *memoryLimit) check(share int64, place *connlimit.Place) error {
	most := m.bytes / 100 * share
	used := memoryUsed()
	if m.bytes <= 0 || used <= most || place.Displace() {
		return nil
	}
	err := status.Errorf(codes.ResourceExhausted, "this control plane uses %d MiB of memory, and accepts clients below %d MiB: "+
		"raise its memory limit (GOMEMLIMIT, or resources.limits.memory of its container), or add replicas", used>>20, most>>20)
	m.refused()
	m.lines.Do(func() { m.log.Error("clients are refused", "error", status.Convert(err).Message()) })
	return err
}

// memoryUsed returns the number of bytes that Go has from the kernel, except for the free bytes and for the garbage that has
// come since the last collection: near its limit (GOMEMLIMIT), Go collects garbage again. The call takes microseconds.
func memoryUsed() (used int64) {
	const prefix = "/memory/classes/"
	samples := []runtimemetrics.Sample{
		{Name: prefix + "total:bytes"}, {Name: "/gc/heap/live:bytes"}, // of the last collection
		{Name: prefix + "heap/released:bytes"}, {Name: prefix + "heap/free:bytes"}, {Name: prefix + "heap/objects:bytes"},
	}
	runtimemetrics.Read(samples)
	for i, s := range samples {
		bytes := int64(s.Value.Uint64()) //nolint:gosec // less than the memory of a machine
		if i > 1 {
			bytes = -bytes
		}
		used += bytes
	}
	return used
}
