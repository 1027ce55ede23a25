package files

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/nametap/nametap/internal/statedir"
)

// The file of the last good contents in the state directory.
const (
	savedFile   = "files.json"
	savedFormat = "nametap-files/1"
)

// save writes the last good contents of files to the state directory. They are saved as they are, so that a later version
// of nametap can read fields that this version does not know.
func save(dir *statedir.Dir, files map[string]*file) error {
	contents := map[string][]byte{}
	for name, f := range files {
		if f.good {
			contents[name] = f.data
		}
	}
	if err := dir.Save(savedFile, savedFormat, contents); err != nil {
		return fmt.Errorf("writing the last good objects (--state-dir): %w", err)
	}
	return nil
}

// load reads the files that save has written. It returns none if there is no state directory, or nothing was saved. If
// what was saved is damaged, load moves it aside, and returns [statedir.ErrDamaged].
func load(dir *statedir.Dir) (map[string]*file, error) {
	files := map[string]*file{}
	if dir == nil {
		return files, nil
	}
	contents := map[string][]byte{}
	err := dir.Load(savedFile, savedFormat, func(data json.RawMessage) error { return json.Unmarshal(data, &contents) })
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return files, fmt.Errorf("reading the last good objects (--state-dir): %w", err)
	}
	for name, data := range contents {
		files[name] = newFile(name, stamp{}, data)
	}
	return files, nil
}
