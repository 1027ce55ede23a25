package clusters

import (
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

// The name of a snapshot's file is snapshotPrefix, the name of the cluster, and snapshotSuffix.
const (
	snapshotPrefix = "cluster-"
	snapshotSuffix = ".json"
	snapshotFormat = "nametap-cluster/1"
)

// saveEvery bounds how often the snapshot of a cluster is written.
const saveEvery = 5 * time.Second

// A snapshot has the objects of a cluster that were in use when it was written.
type snapshot struct {
	Cluster string          `json:"cluster"`
	Written time.Time       `json:"written"`
	Objects []object.Object `json:"objects"`
}

// snapshots are the snapshots in a state directory. If dir is nil, there are none.
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
	err := s.dir.Save(snapshotFile(cluster), snapshotFormat, snapshot{cluster, time.Now().UTC().Truncate(time.Second), objects})
	if err != nil {
		return fmt.Errorf("writing the snapshot of cluster %s (--state-dir): %w", cluster, err)
	}
	return nil
}

// load reads the snapshot of a cluster, and returns nil if there is none. If it is damaged, load moves
// it aside, and the error is [statedir.ErrDamaged].
func (s snapshots) load(cluster string) (*snapshot, error) {
	if s.dir == nil {
		return nil, nil //nolint:nilnil // documented
	}
	found := new(snapshot)
	err := s.dir.Load(snapshotFile(cluster), snapshotFormat, func(data json.RawMessage) error {
		err := json.Unmarshal(data, found)
		if err == nil && found.Cluster != cluster {
			err = fmt.Errorf("of cluster %q, want %q", found.Cluster, cluster)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // documented
	}
	if err != nil {
		return nil, fmt.Errorf("reading the snapshot of cluster %s (--state-dir): %w", cluster, err)
	}
	return found, nil
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
