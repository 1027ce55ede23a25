package clusters

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/statedir"
)

// The files of snapshots are snapshotPrefix, the name of the cluster, and snapshotSuffix.
const (
	snapshotPrefix = "cluster-"
	snapshotSuffix = ".json"
	snapshotFormat = "nametap-cluster/1"
)

// saveEvery bounds how often the snapshot of a cluster is written.
const saveEvery = 5 * time.Second

// errDamaged marks a snapshot that exists but cannot be trusted.
var errDamaged = errors.New("damaged")

// A snapshot holds the objects of a cluster as they were in use when it was written.
type snapshot struct {
	objects []object.Object
	written time.Time
}

// snapshotState is the content of a file. Sum is the checksum of Objects.
type snapshotState struct {
	Format  string          `json:"format"`
	Cluster string          `json:"cluster"`
	Written time.Time       `json:"written"`
	Sum     string          `json:"sum"`
	Objects json.RawMessage `json:"objects"`
}

// snapshots are the files of a state directory; without one they hold nothing.
type snapshots struct{ dir *statedir.Dir }

func snapshotFile(cluster string) string { return snapshotPrefix + cluster + snapshotSuffix }

// clusters returns the names of the clusters that have a snapshot.
func (s snapshots) clusters() []string {
	if s.dir == nil {
		return nil
	}
	paths, _ := filepath.Glob(s.dir.File(snapshotFile("*"))) // the pattern is valid
	var names []string
	for _, path := range paths {
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), snapshotPrefix), snapshotSuffix))
	}
	return names
}

// save writes the snapshot of a cluster.
func (s snapshots) save(cluster string, objects []object.Object) error {
	encoded, err := json.Marshal(objects)
	if err != nil {
		return fmt.Errorf("encoding the snapshot of cluster %s: %w", cluster, err)
	}
	data, err := json.Marshal(snapshotState{
		Format: snapshotFormat, Cluster: cluster, Written: time.Now().UTC().Truncate(time.Second), Sum: sum(encoded), Objects: encoded,
	})
	if err != nil {
		return fmt.Errorf("encoding the snapshot of cluster %s: %w", cluster, err)
	}
	if err := s.dir.Write(snapshotFile(cluster), append(data, '\n')); err != nil {
		return fmt.Errorf("writing the snapshot of cluster %s (--state-dir): %w", cluster, err)
	}
	return nil
}

// load reads the snapshot of a cluster, and returns nil if there is none. If it is damaged, load moves
// it aside, and the error is errDamaged.
func (s snapshots) load(cluster string) (*snapshot, error) {
	if s.dir == nil {
		return nil, nil //nolint:nilnil // documented
	}
	path := s.dir.File(snapshotFile(cluster))
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // documented
	}
	if err != nil {
		return nil, fmt.Errorf("reading the snapshot of cluster %s (--state-dir): %w", cluster, err)
	}
	found, err := decodeSnapshot(data, cluster)
	if err == nil {
		return found, nil
	}
	aside := path + ".damaged"
	if renameErr := os.Rename(path, aside); renameErr != nil {
		return nil, fmt.Errorf("setting a damaged file aside: %w", renameErr)
	}
	return nil, fmt.Errorf("the snapshot %s is %w: %w; it was moved to %s", path, errDamaged, err, aside)
}

func decodeSnapshot(data []byte, cluster string) (*snapshot, error) {
	var state snapshotState
	if err := json.Unmarshal(data, &state); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	switch {
	case state.Format != snapshotFormat:
		return nil, fmt.Errorf("format %q, want %q", state.Format, snapshotFormat)
	case state.Cluster != cluster:
		return nil, fmt.Errorf("of cluster %q, want %q", state.Cluster, cluster)
	case sum(state.Objects) != state.Sum:
		return nil, errors.New("the checksum does not match")
	}
	s := &snapshot{written: state.Written}
	if err := json.Unmarshal(state.Objects, &s.objects); err != nil {
		return nil, fmt.Errorf("objects: %w", err)
	}
	return s, nil
}

// remove removes the snapshot of a cluster, if there is one.
func (s snapshots) remove(cluster string) error {
	if s.dir == nil {
		return nil
	}
	if err := os.Remove(s.dir.File(snapshotFile(cluster))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the snapshot of cluster %s (--state-dir): %w", cluster, err)
	}
	return nil
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}
