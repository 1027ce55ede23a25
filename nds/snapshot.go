package nds

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// The file holds, one after the other: magic; the SHA-256 of what follows it;
// the time of the push, nanoseconds since 1970, 8 bytes big endian; a
// DeltaDiscoveryResponse with the resources, in which the control plane's
// identifier names the owner.
const (
	snapshotName  = "nametable.snapshot"
	snapshotMagic = "nametap\x01"
	snapshotHead  = len(snapshotMagic) + sha256.Size + 8
)

// snapshot is a set of resources as it is kept on disk.
type snapshot struct {
	owner     string
	version   string
	pushed    time.Time
	resources []Resource
}

// snapshotOwner names whose table a snapshot holds: what one namespace of one
// cluster may see is wrong for another.
func snapshotOwner(n Node) string { return n.Namespace + "/" + n.ClusterID }

// restore puts the snapshot to use, if there is a good one. One that is damaged
// or not ours is set aside, so that it is neither used nor lost.
func (c *Client) restore() {
	if c.cfg.StateDir == "" {
		return
	}
	path := filepath.Join(c.cfg.StateDir, snapshotName)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		c.log.Warn("snapshot of the table not read, starting without", "error", err)
		return
	}
	s, err := parseSnapshot(data)
	if owner := snapshotOwner(c.cfg.Node); err == nil && s.owner != owner {
		err = fmt.Errorf("it belongs to %q, we are %q", s.owner, owner)
	}
	if err == nil {
		err = c.apply(s.resources)
	}
	if err != nil {
		aside := path + ".bad"
		c.log.Warn("snapshot of the table set aside, starting without",
			"path", path, "moved_to", aside, "error", errors.Join(err, os.Rename(path, aside)))
		return
	}
	c.inUse, c.loaded = s.resources, true
	c.setTable(table{version: s.version, pushed: s.pushed, resources: len(s.resources), stale: true})
	c.log.Info("table from the snapshot in use until the control plane sends one",
		"path", path, "version", s.version, "pushed", s.pushed)
}

// save writes the set in use to disk, if it is not there yet. A failure is not
// the control plane's business; the next push tries again.
func (c *Client) save() {
	if c.cfg.StateDir == "" || !c.unsaved {
		return
	}
	state := c.Status()
	data, err := snapshot{
		owner: snapshotOwner(c.cfg.Node), version: state.Version, pushed: state.LastPush, resources: c.inUse,
	}.marshal()
	if err == nil {
		err = replaceFile(filepath.Join(c.cfg.StateDir, snapshotName), data)
	}
	if err != nil {
		c.log.Warn("snapshot of the table not written, a restart may start with an older one", "error", err)
		return
	}
	c.unsaved = false
}

// marshal returns the contents of the file.
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
	binary.BigEndian.PutUint64(data[snapshotHead-8:], uint64(s.pushed.UnixNano()))
	data, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(data, m)
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	sum := sha256.Sum256(data[snapshotHead-8:])
	copy(data[len(snapshotMagic):], sum[:])
	return data, nil
}

// parseSnapshot reads the contents of the file.
func parseSnapshot(data []byte) (snapshot, error) {
	rest, ours := bytes.CutPrefix(data, []byte(snapshotMagic))
	if !ours || len(data) < snapshotHead {
		return snapshot{}, errors.New("it is no snapshot of this version of nametap")
	}
	sum, rest := rest[:sha256.Size], rest[sha256.Size:]
	if want := sha256.Sum256(rest); !bytes.Equal(sum, want[:]) {
		return snapshot{}, errors.New("it is damaged: the checksum is wrong")
	}
	m := &discoveryv3.DeltaDiscoveryResponse{}
	if err := proto.Unmarshal(rest[8:], m); err != nil {
		return snapshot{}, fmt.Errorf("it is damaged: %w", err)
	}
	set, err := fold(nil, response{typeURL: m.GetTypeUrl(), whole: true, resources: m.GetResources()})
	if err != nil {
		return snapshot{}, fmt.Errorf("it is damaged: %w", err)
	}
	return snapshot{
		owner:     m.GetControlPlane().GetIdentifier(),
		version:   m.GetSystemVersionInfo(),
		pushed:    time.Unix(0, int64(binary.BigEndian.Uint64(rest))),
		resources: set,
	}, nil
}

// replaceFile gives path the contents data in one step: whoever reads it, after
// a power cut too, sees the old contents or the new.
func replaceFile(path string, data []byte) error {
	temporary := path + ".tmp"
	if err := writeSynced(temporary, data); err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// writeSynced writes a file that only its owner may read, down to the disk.
func writeSynced(path string, data []byte) error {
	const ownerOnly = 0o600
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, ownerOnly)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
