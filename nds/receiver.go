package nds

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/statedir"
)

// ApplyFunc replaces shards of the table. A shard has the hosts whose names have the same hash
// ([digest.ShardOf]). The parameter shards has all entries of each shard to replace, as a NameTable in wire form.
// Shards of the table that it does not have stay unchanged. If ApplyFunc returns an error, all shards must stay
// unchanged, and the push is rejected with that reason. Only one goroutine calls ApplyFunc. It may keep the
// entries, but must not change them.
type ApplyFunc func(shards map[int][]byte) error

// A receiver applies pushes and the snapshot. The goroutine of Client.Run owns it.
type receiver struct {
	cfg     Config
	apply   ApplyFunc
	log     *slog.Logger
	metrics *metrics
	state   *state
	saver   *snapshotSaver
	dir     *statedir.Dir

	// node is the node of the current stream.
	node *corev3.Node
	// table is the table that apply accepted last, from any stream or from the snapshot; nil before that.
	// tableNode is the fingerprint of the node to which table was sent, if table came as changes.
	table     *hostTable
	tableNode string
	// undetected is true if the table differs from the control plane's table although both have the same checksums
	// of shards.
	undetected bool
	// snapshotUnread is true if the snapshot could not be read. Then the receiver tries to read it before
	// every connect, until a table is in use.
	snapshotUnread  bool
	restoreFailures logonce.Log // logs why the snapshot could not be read
}

// restore applies the snapshot. If the snapshot cannot be read now, restoreAgain reads it before the next connect.
// If the snapshot is damaged or belongs to another node, restore renames the file: it is kept, but not used again.
func (r *receiver) restore() {
	r.snapshotUnread = false
	if r.cfg.StateDir == "" {
		return
	}
	path := r.dir.File(snapshotName)
	data, err := os.ReadFile(path)
	lockErr := r.dir.Lock()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return
	case err != nil:
		r.snapshotUnread = true
		r.restoreFailures.Report("snapshot of the table not read: it is read again at the next connect", slog.LevelWarn, err)
		return
	}
	s, err := parseSnapshot(data)
	if owner := snapshotOwner(r.cfg.Node); err == nil && s.owner != owner {
		err = fmt.Errorf("it belongs to %q, this node is %q", s.owner, owner)
	}
	if err == nil {
		err = r.useSnapshot(&s)
	}
	if err != nil {
		r.setAside(err, lockErr)
		return
	}
	if s.unused > 0 {
		r.log.Warn("the last changes in the snapshot of the table are damaged, older hosts are used until the control plane sends newer ones",
			"path", path, "bytes", s.unused)
	}
	r.state.setTable(r.table, s.version, s.pushed, true)
	r.log.Info("using the table of the snapshot until the control plane sends one",
		"path", path, "version", s.version, "pushed", s.pushed)
}

// restoreAgain applies the snapshot if it could not be read before and no table is in use.
func (r *receiver) restoreAgain() {
	if r.snapshotUnread && r.table == nil {
		r.restore()
	}
}

// useSnapshot applies a snapshot.
func (r *receiver) useSnapshot(s *savedTable) error {
	if err := r.apply(s.table.differingFrom(nil)); err != nil {
		return err
	}
	r.table, r.tableNode = s.table, s.node
	return nil
}

// setAside renames a snapshot that cannot be used. reason says why. If lockErr is not nil, another process may own
// the snapshot, so setAside leaves it in place.
func (r *receiver) setAside(reason, lockErr error) {
	path, aside, err := r.dir.File(snapshotName), "", lockErr
	if err == nil {
		aside, err = r.dir.SetAside(snapshotName, "bad")
	}
	if err != nil {
		r.log.Warn("snapshot of the table not used", "path", path, "error", errors.Join(reason, err))
		return
	}
	r.log.Warn("snapshot of the table set aside", "path", path, "moved_to", aside, "error", reason)
}

// firstNode returns the node for the first request of a stream: node itself or, if the table in use came as changes, a
// copy of node with the checksums of the table. After a request with checksums, the control plane sends only the shards
// that differ.
func (r *receiver) firstNode(node *corev3.Node) *corev3.Node {
	r.node = node
	if r.table == nil || r.table.mode != ModeHosts || r.undetected {
		return node
	}
	extended := proto.CloneOf(node)
	fields := extended.GetMetadata().GetFields()
	fields[metadataHosts] = structpb.NewStringValue(base64.StdEncoding.EncodeToString(r.table.sums.Digests().Bytes()))
	// The revision says what the control plane had read when it sent the table. It is valid only for the node to
	// which the table was sent, so it is sent only if this node is the same.
	if len(r.table.revision) > 0 && r.tableNode == fingerprint(node) {
		fields[metadataRevision] = structpb.NewStringValue(base64.StdEncoding.EncodeToString(r.table.revision))
	}
	return extended
}

// use applies a response, and returns how the new table differs from the table that the snapshotSaver got last.
// The parameter first is true if no earlier response of the stream was accepted.
func (r *receiver) use(resp response, first bool) (tableDiff, error) {
	value, hasTable, err := resp.table()
	if err != nil {
		return tableDiff{}, err
	}
	isChange, err := hasChange(value)
	if err != nil {
		return tableDiff{}, fmt.Errorf("a table of %d bytes: %w", len(value), err)
	}
	next := r.table
	switch {
	case isChange:
		next, err = r.changed(value, first)
	case hasTable, resp.allResources, slices.Contains(resp.removed, ""), next == nil, first && next.mode == ModeWhole:
		next, err = wholeTable(value)
	}
	if err != nil {
		return tableDiff{}, err
	}
	shards, result := next.differingFrom(r.table), resultUnchanged
	if len(shards) > 0 {
		result = resultApplied
		start := time.Now()
		err := r.apply(shards)
		r.metrics.duration.Observe(time.Since(start).Seconds())
		if err != nil {
			return tableDiff{}, err
		}
		if next.len() == 0 && r.table != nil && r.table.len() > 0 {
			r.log.Warn("the control plane sent no mesh hosts, the table is empty now", "version", clip.Text(resp.version, maxVersion))
		}
	}
	diff := tableDiff{all: len(shards) > 0}
	if described := fingerprint(r.node); isChange {
		diff.all = r.table == nil || r.table.mode != ModeHosts || described != r.tableNode
		if !diff.all && (len(shards) > 0 || !bytes.Equal(r.table.revision, next.revision)) {
			diff.change = value
		}
		r.tableNode = described
	}
	r.table = next
	r.pushed(resp, result)
	return diff, nil
}

// changed returns the table after the change in value, a NameTable in wire form. If the resulting table does not
// have the checksum of the change, the next stream requests the shards that differ. But if the change was the first
// of its stream, the next stream requests all shards, because the checksums of the shards did not show what
// differs.
func (r *receiver) changed(value []byte, first bool) (*hostTable, error) {
	parsed, err := parseChange(value)
	if err != nil {
		return nil, err
	}
	next, err := r.table.apply(&parsed)
	if r.undetected = err != nil && first; err == nil {
		return next, nil
	}
	if r.table != nil && r.table.mode == ModeHosts {
		r.table = r.table.summed()
	}
	r.state.update(func(s *Status) {
		s.ChecksumDifferences++
		s.LastChecksumDifference, s.Digest = shorten(err).Error(), r.table.digest()
	})
	return nil, err
}

// pushed counts and logs an accepted response, whose table is in use.
func (r *receiver) pushed(resp response, result string) {
	r.metrics.pushed(result, resp.bytes)
	log, version := r.log.Debug, clip.Text(resp.version, maxVersion)
	if r.state.setTable(r.table, version, time.Now(), false) {
		log = r.log.Info
	}
	log("table pushed", "version", version, "result", result, "mode", r.table.mode, "hosts", r.table.len(), "bytes", resp.bytes)
}

// reject counts and logs a rejected response.
func (r *receiver) reject(resp response, reason error) {
	r.metrics.pushed(resultRejected, resp.bytes)
	r.state.update(func(s *Status) {
		s.Pushes++
		s.Rejected++
		s.LastError = reason.Error()
	})
	r.log.Warn("push rejected, the current table stays", "version", clip.Text(resp.version, maxVersion),
		"nonce", clip.Text(resp.nonce, maxVersion), "error", reason)
}

// save passes the table in use to the goroutine that writes the snapshot.
func (r *receiver) save(diff tableDiff) {
	if r.cfg.StateDir == "" {
		return
	}
	state := r.state.read()
	r.saver.put(snapshot{
		owner: snapshotOwner(r.cfg.Node), version: state.Version, pushed: state.LastPush, table: r.table, node: r.tableNode,
	}, diff)
}
