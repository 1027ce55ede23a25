package resolvconf

import (
	"cmp"
	"os"
)

// Keep copies the resolv.conf f.Path to path. It does nothing if the resolv.conf names no nameserver.
func (f Files) Keep(path string) error {
	text, err := readFile(cmp.Or(f.Path, DefaultPath))
	if err != nil || len(Parse(text).Servers) == 0 {
		return err
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, text, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
