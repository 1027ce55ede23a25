package statedir

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// ErrDamaged is the error for a file of [Dir.Save] that exists but cannot be trusted: the file was truncated,
// edited by hand, or written by another program.
var ErrDamaged = errors.New("damaged")

// checked is the content of a file. Sum is the checksum of Data.
type checked struct {
	Format string          `json:"format"`
	Sum    string          `json:"sum"`
	Data   json.RawMessage `json:"data"`
}

// Save writes a value as JSON, with a checksum and the name of its format.
func (d *Dir) Save(name, format string, value any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	text, err := json.Marshal(checked{Format: format, Sum: sum(data), Data: data})
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	return d.Write(name, text, []byte{'\n'})
}

// Load calls decode with the JSON of a file that Save has written. If the file cannot be trusted, or decode fails, Load
// renames the file, and the error is ErrDamaged. If there is no file, the error is [fs.ErrNotExist].
func (d *Dir) Load(name, format string, decode func(data json.RawMessage) error) error {
	text, err := os.ReadFile(d.File(name))
	if err != nil {
		return err
	}
	var c checked
	err = json.Unmarshal(text, &c)
	switch {
	case err != nil:
		err = fmt.Errorf("not JSON: %w", err)
	case c.Format != format:
		err = fmt.Errorf("format %q, want %q", c.Format, format)
	case c.Sum != sum(c.Data):
		err = errors.New("the checksum does not match")
	default:
		err = decode(c.Data)
	}
	if err == nil {
		return nil
	}
	aside, asideErr := d.SetAside(name, "damaged")
	if asideErr != nil {
		return fmt.Errorf("setting a damaged file aside: %w", asideErr)
	}
	return fmt.Errorf("%s is %w: %w; it was moved to %s", d.File(name), ErrDamaged, err, aside)
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}
