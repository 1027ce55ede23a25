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

// The file holds, one after the other: magic; the time of the last push, nanoseconds
// since 1970, 8 bytes big endian; the SHA-256 of what follows it; a
// DeltaDiscoveryResponse with the resources, in which the control plane's identifier
// names the owner. The time is overwritten in place when a push changes nothing, so it
// has no checksum.
const (
	lockName       = "nametap.lock"
	snapshotName   = "nametable.snapshot"
	snapshotFamily = "nametap"
	snapshotMagic  = snapshotFamily + "\x02"
	snapshotSum    = len(snapshotMagic) + 8
	snapshotHead   = snapshotSum + sha256.Size
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

// restore puts the snapshot to use, if there is a good one. One that is damaged or of
// another node is set aside, so that it is neither used nor lost.
func (c *Client) restore() {
	if c.cfg.StateDir == "" {
		return
	}
	owned := c.dir.Lock()
	path := c.dir.File(snapshotName)
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
		err = fmt.Errorf("it belongs to %q, this node is %q", s.owner, owner)
	}
	if err == nil {
		err = c.apply(s.resources)
	}
	switch {
	case err == nil:
	case owned != nil: // and so it is for its owner to deal with
		c.log.Warn("snapshot of the table not used, starting without", "path", path, "error", errors.Join(err, owned))
		return
	default:
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

// save writes the set in use to disk, or only the time of the push if the set is there
// already. A failure does not concern the control plane; the next push tries again.
func (c *Client) save() {
	if c.cfg.StateDir == "" {
		return
	}
	state := c.Status()
	if !c.unsaved && c.touch(state.LastPush) == nil {
		return
	}
	data, err := snapshot{
		owner: snapshotOwner(c.cfg.Node), version: state.Version, pushed: state.LastPush, resources: c.inUse,
	}.marshal()
	if err == nil {
		err = c.dir.Write(snapshotName, data)
	}
	if err != nil {
		c.unkept.say("snapshot of the table not written, a restart may start with an older one", slog.LevelWarn, err)
		return
	}
	c.unkept.over()
	c.unsaved = false
}

// touch writes the time of the last push into the snapshot.
func (c *Client) touch(pushed time.Time) error {
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
	binary.BigEndian.PutUint64(data[len(snapshotMagic):], uint64(s.pushed.UnixNano()))
	data, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(data, m)
	if err != nil {
		return nil, fmt.Errorf("marshalling: %w", err)
	}
	sum := sha256.Sum256(data[snapshotHead:])
	copy(data[snapshotSum:], sum[:])
	return data, nil
}

// parseSnapshot reads the contents of the file.
func parseSnapshot(data []byte) (snapshot, error) {
	switch {
	case !bytes.HasPrefix(data, []byte(snapshotFamily)):
		return snapshot{}, errors.New("it is no snapshot of nametap")
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
	set, err := fold(nil, response{typeURL: m.GetTypeUrl(), whole: true, resources: m.GetResources()})
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
