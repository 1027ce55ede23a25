package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	lockName = "nametap-discovery.lock" // in the state directory
	// The file of automatic VIPs in the state directory.
	vipsFile   = "vips.json"
	vipsFormat = "nametap-vips/1"
)

// ErrVIPs reports that the automatic VIPs in the state directory cannot be read.
var ErrVIPs = errors.New("reading the automatic VIPs")

// openState locks the state directory and checks that files can be written to it. A
// second control plane with the same directory would overwrite the files of the first.
func openState(path string) (*statedir.Dir, error) {
	dir := statedir.New(path, lockName)
	err := dir.Lock()
	if errors.Is(err, statedir.ErrTaken) {
		return nil, fmt.Errorf("state directory %q: %w", path, err)
	}
	if err == nil {
		err = statedir.Check(path)
	}
	if err != nil {
		dir.Unlock()
		return nil, fmt.Errorf("state directory %q: %w: make it writable, or name another (--state-dir)", path, err)
	}
	return dir, nil
}

// vips are the automatic VIPs, and the directory in which they are saved.
type vips struct {
	*hosts.VIPs
	dir     *statedir.Dir // locked; nil for none
	unsaved bool          // the file is older than VIPs
}

// openVIPs locks a state directory, unless it is "", and reads its VIPs. A damaged file is moved aside.
func openVIPs(path string, log *slog.Logger) (vips, error) {
	v := vips{VIPs: hosts.NewVIPs()}
	if path == "" {
		return v, nil
	}
	var err error
	if v.dir, err = openState(path); err != nil {
		return v, err
	}
	err = v.read(v.dir.Load)
	if errors.Is(err, statedir.ErrDamaged) {
		log.Error("the file of automatic VIPs is damaged and was moved; hosts may get other VIPs", "error", err)
		return v, nil
	}
	return v, err
}

// read reads the VIPs with load, a method of a state directory. If there is no file, there are no VIPs.
func (v *vips) read(load func(name, format string, decode func(json.RawMessage) error) error) error {
	err := load(vipsFile, vipsFormat, func(data json.RawMessage) error {
		all, err := hosts.DecodeVIPs(data)
		if err == nil {
			v.VIPs = all
		}
		return err
	})
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return fmt.Errorf("%w (--state-dir): %w", ErrVIPs, err)
}

// save saves the VIPs if they have changed since they were last saved.
func (v *vips) save() error {
	v.unsaved = v.unsaved && v.dir != nil
	if !v.unsaved {
		return nil
	}
	encoded, err := v.Encode()
	if err != nil {
		return fmt.Errorf("encoding the automatic VIPs: %w", err)
	}
	if err := v.dir.Save(vipsFile, vipsFormat, json.RawMessage(encoded)); err != nil {
		return fmt.Errorf("writing the automatic VIPs (--state-dir): %w", err)
	}
	v.unsaved = false
	return nil
}

// close unlocks the state directory, if there is one.
func (v *vips) close() {
	if v.dir != nil {
		v.dir.Unlock()
	}
}
