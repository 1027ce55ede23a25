package discovery

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

const (
	stateFile   = "vips.json"
	stateFormat = "nametap-vips/1"
)

// errDamaged marks a state file that is there and cannot be trusted.
var errDamaged = errors.New("damaged")

// vipState is the state file. Sum covers Hosts, so that a file that was cut
// or edited by hand is not mistaken for ours.
type vipState struct {
	Format string          `json:"format"`
	Sum    string          `json:"sum"`
	Hosts  json.RawMessage `json:"hosts"`
}

// loadVIPs reads the state of dir. No file is an empty state. An error that is
// errDamaged means that the file was set aside and the state is empty.
func loadVIPs(dir string) (*vips, error) {
	v, err := peekVIPs(dir)
	if !errors.Is(err, errDamaged) {
		return v, err
	}
	err = setAside(filepath.Join(dir, stateFile), err)
	if errors.Is(err, errDamaged) {
		err = fmt.Errorf("%w, and hosts may get other automatic addresses", err)
	}
	return v, err
}

// setAside moves a damaged file out of the way and adds to err where it is. An
// error that is not errDamaged means that the file cannot be moved.
func setAside(path string, err error) error {
	aside := path + ".damaged"
	if rerr := os.Rename(path, aside); rerr != nil {
		return fmt.Errorf("setting a damaged file aside: %w", rerr)
	}
	return fmt.Errorf("%w; it was moved to %s", err, aside)
}

// peekVIPs is loadVIPs that leaves a damaged file where it is.
func peekVIPs(dir string) (*vips, error) {
	path := filepath.Join(dir, stateFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &vips{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the VIP state: %w", err)
	}
	v, err := decodeVIPs(data)
	if err != nil {
		return &vips{}, fmt.Errorf("VIP state %s is %w: %w", path, errDamaged, err)
	}
	return v, nil
}

func decodeVIPs(data []byte) (*vips, error) {
	var s vipState
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if s.Format != stateFormat {
		return nil, fmt.Errorf("format %q, want %q", s.Format, stateFormat)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, s.Hosts); err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	if sum(compact.Bytes()) != s.Sum {
		return nil, errors.New("the checksum does not match")
	}
	v := &vips{byHost: map[string]vipHost{}}
	if err := json.Unmarshal(s.Hosts, &v.byHost); err != nil {
		return nil, fmt.Errorf("hosts: %w", err)
	}
	taken := map[uint16]string{}
	for host, h := range v.byHost {
		if other, ok := taken[h.Slot]; ok || !usableSlot(h.Slot) {
			return nil, fmt.Errorf("slot %d of %q is not usable or also that of %q", h.Slot, host, other)
		}
		taken[h.Slot] = host
		v.clock = max(v.clock, h.Gone)
	}
	return v, nil
}

// save writes the state so that a crash leaves either the old file or the new
// one, never a part.
func (v *vips) save(dir string) error {
	hosts, err := json.Marshal(v.byHost)
	if err != nil {
		return fmt.Errorf("encoding the VIP state: %w", err)
	}
	data, err := json.MarshalIndent(vipState{Format: stateFormat, Sum: sum(hosts), Hosts: hosts}, "", " ")
	if err != nil {
		return fmt.Errorf("encoding the VIP state: %w", err)
	}
	if err := writeAtomically(filepath.Join(dir, stateFile), append(data, '\n')); err != nil {
		return fmt.Errorf("writing the VIP state: %w", err)
	}
	return nil
}

func sum(data []byte) string {
	s := sha256.Sum256(data)
	return hex.EncodeToString(s[:])
}

func writeAtomically(path string, data []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the error that counts is returned
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// prepareStateDir makes the directory, removes what a crash left half written,
// and proves that the directory can be written.
func prepareStateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("making the state directory: %w", err)
	}
	for _, name := range []string{stateFile, objectsFile} {
		left, err := filepath.Glob(filepath.Join(dir, name+".*.tmp"))
		if err != nil {
			return fmt.Errorf("looking for leftovers in the state directory: %w", err)
		}
		for _, path := range left {
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("removing a leftover from the state directory: %w", err)
			}
		}
	}
	probe, err := os.CreateTemp(dir, "probe.*.tmp")
	if err != nil {
		return fmt.Errorf("writing to the state directory: %w", err)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}
