package nds

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
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
		c.snapshotFailures.report("snapshot of the table not read, the next connect tries again", slog.LevelWarn, err)
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
	c.log.Info("table from the snapshot in use until the control plane sends one",
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

// save writes the set in use to the snapshot, or only the time of the push if the snapshot
// holds the set already. If that fails, the next push tries again.
func (c *Client) save() {
	if c.cfg.StateDir == "" {
		return
	}
	state := c.Status()
	if !c.unsaved && c.saveTime(state.LastPush) == nil {
		return
	}
	data, err := snapshot{
		owner: snapshotOwner(c.cfg.Node), version: state.Version, pushed: state.LastPush, resources: c.inUse,
	}.marshal()
	if err == nil {
		err = c.dir.Write(snapshotName, data)
	}
	if err != nil {
		c.snapshotFailures.report("snapshot of the table not written, a restart may start with an older one", slog.LevelWarn, err)
		return
	}
	c.snapshotFailures.reset()
	c.unsaved = false
}

// saveTime writes the time of the last push to the snapshot.
func (c *Client) saveTime(pushed time.Time) error {
	if err := c.dir.Lock(); err != nil {
		return err
	}
	file, err := os.OpenFile(c.dir.File(snapshotName), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(binary.BigEndian.AppendUint64(nil, uint64(pushed.UnixNano())), int64(len(snapshotMagic)))
	return errors.Join(err, file.Close())
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
