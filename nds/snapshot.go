package nds

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	lockName     = "nametap.lock"
	snapshotName = "nametable.snapshot"
)

// A snapshotSaver writes snapshots in its own goroutine. So a disk that is slow or does not answer delays no push.
type snapshotSaver struct {
	dir   *statedir.Dir
	state *state
	wake  chan struct{} // wakes run after put

	mu    sync.Mutex
	next  *snapshot // the snapshot to write; nil if there is nothing new
	saved bool      // whether a write has succeeded

	failures logonce.Log // of the goroutine of run
}

func newSnapshotSaver(dir *statedir.Dir, log *slog.Logger, s *state) *snapshotSaver {
	return &snapshotSaver{dir: dir, state: s, wake: make(chan struct{}, 1), failures: logonce.New(log)}
}

// start runs the saver. The function stop ends it, and waits until the last snapshot is written and the directory is
// unlocked.
func (s *snapshotSaver) start() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.run(ctx)
		s.dir.Unlock()
	}()
	return func() {
		cancel()
		<-done
	}
}

// put makes the parameter next the snapshot to write. If only the time of the push differs from the previous one,
// changed is false, and the snapshot is written with the next change or at the end.
func (s *snapshotSaver) put(next snapshot, changed bool) {
	s.mu.Lock()
	s.next = &next
	s.mu.Unlock()
	if changed {
		chans.Wake(s.wake)
	}
}

// After a write, the saver pauses for savePause, because a write costs as much as the table is long. After a failure
// the pause is longer, up to maxSavePause, and the saver retries after it.
const (
	savePause    = 10 * time.Second
	maxSavePause = 30 * time.Minute
)

// run writes snapshots until ctx ends, and then writes the last snapshot.
func (s *snapshotSaver) run(ctx context.Context) {
	for failed := 0; ctx.Err() == nil; {
		select {
		case <-s.wake:
			if failed++; s.save() {
				failed = 0
			} else {
				chans.Wake(s.wake)
			}
			clock.Sleep(ctx, clock.BackOff(failed, savePause, maxSavePause))
		case <-ctx.Done():
		}
	}
	s.save()
}

// save writes the snapshot in s.next. It returns false if that failed.
func (s *snapshotSaver) save() (ok bool) {
	s.mu.Lock()
	next := s.next
	s.next = nil
	s.mu.Unlock()
	if next == nil {
		return true
	}
	parts, err := next.marshal()
	if err == nil {
		err = s.dir.Write(snapshotName, parts...)
	}
	if err == nil {
		s.failures.Reset()
		s.state.update(func(status *Status) { status.SnapshotError = "" })
		s.mu.Lock()
		defer s.mu.Unlock()
		s.saved = true
		return true
	}
	s.failures.Report("snapshot of the table not written: the agent may start with an older table", slog.LevelWarn, err)
	s.state.update(func(status *Status) { status.SnapshotError = err.Error() })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next = next
	}
	return false
}

// hasSaved reports whether a write has succeeded.
func (s *snapshotSaver) hasSaved() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.saved
}

// The snapshot file has snapshotMagic, the SHA-256 of the rest, and a DeltaDiscoveryResponse with the resources of the
// table. Its control plane identifier is the owner, and its nonce is the time of the last push.
const (
	snapshotFamily = "nametap"
	snapshotMagic  = snapshotFamily + "\x05"
	snapshotHead   = len(snapshotMagic) + sha256.Size
)

// snapshot is the content of the snapshot file. A snapshot that was read has the field response, and a snapshot to
// write has the field shards.
type snapshot struct {
	owner    string
	version  string
	pushed   time.Time
	shards   *shards
	response response
}

// snapshotOwner identifies the nodes that may use a snapshot. They are in the same namespace of the same cluster,
// because other nodes get other tables.
func snapshotOwner(n Node) string { return n.Namespace + "/" + n.ClusterID }

// marshal returns the parts of the snapshot file. It does not join them, because that would copy the whole table.
func (s snapshot) marshal() ([][]byte, error) {
	head, err := proto.Marshal(&discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: s.version,
		TypeUrl:           TypeURL,
		ControlPlane:      &corev3.ControlPlane{Identifier: s.owner},
		Nonce:             s.pushed.Format(time.RFC3339Nano),
	})
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	parts := [][]byte{nil, head}
	for r := range s.shards.all {
		parts = append(parts, digest.ResourceHead(r.name, r.version, r.bytes))
		for _, p := range r.parts {
			parts = append(parts, p.entries)
		}
	}
	sum := sha256.New()
	for _, part := range parts {
		sum.Write(part)
	}
	parts[0] = sum.Sum([]byte(snapshotMagic))
	return parts, nil
}

// parseSnapshot parses the content of a snapshot file.
func parseSnapshot(data []byte) (snapshot, error) {
	switch {
	case !bytes.HasPrefix(data, []byte(snapshotFamily)):
		return snapshot{}, errors.New("it is not a snapshot of nametap")
	case !bytes.HasPrefix(data, []byte(snapshotMagic)) && len(data) > len(snapshotFamily):
		return snapshot{}, errors.New("it is a snapshot of another version of nametap")
	case len(data) < snapshotHead:
		return snapshot{}, fmt.Errorf("it is damaged: it has only %d bytes", len(data))
	}
	if want := sha256.Sum256(data[snapshotHead:]); !bytes.Equal(data[len(snapshotMagic):snapshotHead], want[:]) {
		return snapshot{}, errors.New("it is damaged: the checksum is wrong")
	}
	m := &discoveryv3.DeltaDiscoveryResponse{}
	err := proto.Unmarshal(data[snapshotHead:], m)
	s := snapshot{owner: m.GetControlPlane().GetIdentifier(), version: m.GetSystemVersionInfo()}
	if err == nil {
		s.pushed, err = time.Parse(time.RFC3339Nano, m.GetNonce())
	}
	if err != nil {
		return snapshot{}, fmt.Errorf("it is damaged: %w", err)
	}
	s.response = response{typeURL: m.GetTypeUrl(), version: s.version, resources: m.GetResources()}
	return s, nil
}
