package nds

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/internal/statedir"
)

// The snapshot file holds, in this order: magic; the time of the last push, nanoseconds
// since 1970, 8 bytes big endian; the SHA-256 of the rest of the file; a
// DeltaDiscoveryResponse with the resources, whose control plane identifier names the
// owner. A push that changes nothing overwrites the time in place, so the checksum does
// not cover it.
const (
	lockName       = "nametap.lock"
	snapshotName   = "nametable.snapshot"
	snapshotFamily = "nametap"
	snapshotMagic  = snapshotFamily + "\x02"
	snapshotSum    = len(snapshotMagic) + 8
	snapshotHead   = snapshotSum + sha256.Size
)

// snapshot is the content of the snapshot file.
type snapshot struct {
	owner     string
	version   string
	pushed    time.Time
	resources []Resource
}

// snapshotOwner identifies the nodes that may use a snapshot: the table of one namespace
// of one cluster is wrong for another.
func snapshotOwner(n Node) string { return n.Namespace + "/" + n.ClusterID }

// restore puts the snapshot to use. A snapshot that cannot be read now is read again by
// the next connect. A snapshot that is damaged or belongs to another node is renamed, so
// that it is neither used nor lost.
func (c *Client) restore() {
	c.snapshotUnread = false
	if c.cfg.StateDir == "" {
		return
	}
	lockErr := c.dir.Lock()
	path := c.dir.File(snapshotName)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		c.snapshotUnread = true
		c.restoreFailures.report("snapshot of the table not read: it is read again at the next connect", slog.LevelWarn, err)
		return
	}
	s, err := parseSnapshot(data)
	if owner := snapshotOwner(c.cfg.Node); err == nil && s.owner != owner {
		err = fmt.Errorf("it belongs to %q, this node is %q", s.owner, owner)
	}
	if err == nil {
		err = c.apply(s.resources)
	}
	if err != nil {
		c.setAside(path, err, lockErr)
		return
	}
	c.inUse, c.loaded = s.resources, true
	c.setTable(table{version: s.version, pushed: s.pushed, resources: len(s.resources), stale: true})
	c.log.Info("using the table of the snapshot until the control plane sends one",
		"path", path, "version", s.version, "pushed", s.pushed)
}

// setAside renames a snapshot that cannot be used for the given reason. If lockErr is not
// nil, another process owns the snapshot, so setAside leaves it in place.
func (c *Client) setAside(path string, reason, lockErr error) {
	aside := path + ".bad"
	err := lockErr
	if err == nil {
		err = os.Rename(path, aside)
	}
	if err != nil {
		c.log.Warn("snapshot of the table not used", "path", path, "error", errors.Join(reason, err))
		return
	}
	c.log.Warn("snapshot of the table set aside", "path", path, "moved_to", aside, "error", reason)
}

// save passes the set in use to the goroutine that writes the snapshot. changed says that
// the last push changed the set.
func (c *Client) save(changed bool) {
	if c.cfg.StateDir == "" {
		return
	}
	state := c.Status()
	c.saver.put(snapshot{
		owner: snapshotOwner(c.cfg.Node), version: state.Version, pushed: state.LastPush, resources: c.inUse,
	}, changed)
}

// A snapshotSaver writes snapshots from a goroutine of its own, so that a disk that is slow
// or does not answer delays no push.
type snapshotSaver struct {
	dir  *statedir.Dir
	wake chan struct{} // receives after put

	mu      sync.Mutex
	next    *snapshot // what to write; nil if there is nothing new
	changed bool      // the set has changed since run last took next

	// The fields below are owned by the goroutine of run.

	// unsaved says that the file does not hold the set of the last snapshot.
	unsaved  bool
	failures failureLog

	log     *slog.Logger
	timeout time.Duration // how long the end waits for the last snapshot
}

// saveTimeout bounds how long a disk that does not answer delays the end of the process.
const saveTimeout = 3 * time.Second

func newSnapshotSaver(dir *statedir.Dir, log *slog.Logger) *snapshotSaver {
	return &snapshotSaver{
		dir: dir, wake: make(chan struct{}, 1), failures: failureLog{log: log}, log: log, timeout: saveTimeout,
	}
}

// start runs the saver. The function that it returns ends the saver when the last snapshot
// is written, and unlocks the directory. If the disk does not answer in time, it gives up:
// the kernel releases the lock when the process ends.
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
		timer := time.NewTimer(s.timeout)
		defer timer.Stop()
		select {
		case <-done:
		case <-timer.C:
			s.log.Warn("snapshot of the table not written, a restart may start with an older one", "error", "the disk does not answer")
		}
	}
}

// put replaces the snapshot that is to be written.
func (s *snapshotSaver) put(next snapshot, changed bool) {
	s.mu.Lock()
	s.next, s.changed = &next, s.changed || changed
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// run writes snapshots until ctx ends, and then the last one.
func (s *snapshotSaver) run(ctx context.Context) {
	for {
		select {
		case <-s.wake:
			s.saveNext()
		case <-ctx.Done():
			s.saveNext()
			return
		}
	}
}

// saveNext writes the snapshot, or only the time of the push if the file holds the set
// already. If that fails, the snapshot after the next push is written whole.
func (s *snapshotSaver) saveNext() {
	s.mu.Lock()
	next := s.next
	s.unsaved = s.unsaved || s.changed
	s.next, s.changed = nil, false
	s.mu.Unlock()
	if next == nil || !s.unsaved && s.saveTime(next.pushed) == nil {
		return
	}
	data, err := next.marshal()
	if err == nil {
		err = s.dir.Write(snapshotName, data)
	}
	if err != nil {
		s.unsaved = true
		s.failures.report("snapshot of the table not written: the agent may start with an older table", slog.LevelWarn, err)
		return
	}
	s.failures.reset()
	s.unsaved = false
}

// saveTime writes the time of the last push to the file.
func (s *snapshotSaver) saveTime(pushed time.Time) error {
	return s.dir.WriteAt(snapshotName, binary.BigEndian.AppendUint64(nil, uint64(pushed.UnixNano())), int64(len(snapshotMagic)))
}

// marshal returns the content of the snapshot file.
func (s snapshot) marshal() ([]byte, error) {
	m := &discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: s.version,
		TypeUrl:           TypeURL,
		ControlPlane:      &corev3.ControlPlane{Identifier: s.owner},
	}
	for _, r := range s.resources {
		m.Resources = append(m.Resources, &discoveryv3.Resource{
			Name: r.Name, Version: r.Version, Resource: &anypb.Any{TypeUrl: TypeURL, Value: r.Value},
		})
	}
	data := make([]byte, snapshotHead, snapshotHead+proto.Size(m))
	copy(data, snapshotMagic)
	binary.BigEndian.PutUint64(data[len(snapshotMagic):], uint64(s.pushed.UnixNano()))
	data, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(data, m)
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	sum := sha256.Sum256(data[snapshotHead:])
	copy(data[snapshotSum:], sum[:])
	return data, nil
}

// parseSnapshot parses the content of a snapshot file.
func parseSnapshot(data []byte) (snapshot, error) {
	switch {
	case !bytes.HasPrefix(data, []byte(snapshotFamily)):
		return snapshot{}, errors.New("it is not a snapshot of nametap")
	case !bytes.HasPrefix(data, []byte(snapshotMagic)) && len(data) > len(snapshotFamily):
		return snapshot{}, errors.New("it is a snapshot of another version of nametap")
	case len(data) < snapshotHead:
		return snapshot{}, fmt.Errorf("it is damaged: %d bytes, want at least %d", len(data), snapshotHead)
	}
	pushed := time.Unix(0, int64(binary.BigEndian.Uint64(data[len(snapshotMagic):])))
	sum, rest := data[snapshotSum:snapshotHead], data[snapshotHead:]
	if want := sha256.Sum256(rest); !bytes.Equal(sum, want[:]) {
		return snapshot{}, errors.New("it is damaged: the checksum is wrong")
	}
	m := &discoveryv3.DeltaDiscoveryResponse{}
	if err := proto.Unmarshal(rest, m); err != nil {
		return snapshot{}, fmt.Errorf("it is damaged: %w", err)
	}
	set, err := nextSet(nil, response{typeURL: m.GetTypeUrl(), whole: true, resources: m.GetResources()})
	if err != nil {
		return snapshot{}, fmt.Errorf("it is damaged: %w", err)
	}
	return snapshot{
		owner:     m.GetControlPlane().GetIdentifier(),
		version:   m.GetSystemVersionInfo(),
		pushed:    pushed,
		resources: set,
	}, nil
}
