package discovery

import (
	"errors"
	"fmt"

	"github.com/nametap/nametap/internal/statedir"
)

const lockName = "nametap-discovery.lock" // in the state directory

// openState locks the state directory and checks that files can be written to it, unless its disk is full now. A second
// control plane with the same directory would overwrite the files of the first.
func openState(path string) (*statedir.Dir, error) {
	dir := statedir.New(path, lockName)
	err := dir.Lock()
	if errors.Is(err, statedir.ErrTaken) {
		return nil, fmt.Errorf("state directory %q: %w", path, err)
	}
	if err == nil {
		err = statedir.Check(path)
	}
	if err != nil && !statedir.Passing(err) {
		dir.Unlock()
		return nil, fmt.Errorf("state directory %q: %w: make it writable, or name another (--state-dir)", path, err)
	}
	return dir, nil
}
